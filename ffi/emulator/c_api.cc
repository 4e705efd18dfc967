// The plain C interface. See c_api.h.
#include "c_api.h"

#include <cstring>
#include <string>

#include "machine.h"
#include "program.h"
#include "tensor_map.h"

namespace {

thread_local std::string last_error, last_trace, last_entries;

const emulator::Program* find(void* module, const char* entry) {
  auto& entries = static_cast<emulator::Module*>(module)->entries;
  auto found = entries.find(entry);
  if (found == entries.end()) {
    last_error = std::string("no entry '") + entry + "'";
    return nullptr;
  }
  return found->second.get();
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* emulator_load(const char* ptx, size_t bytes) {
  try {
    return emulator::load_module(std::string(ptx, bytes)).release();
  } catch (const std::exception& error) {
    last_error = error.what();
    return nullptr;
  }
}

void emulator_unload(void* module) { delete static_cast<emulator::Module*>(module); }

const char* emulator_entries(void* module) {
  last_entries.clear();
  for (auto& entry : static_cast<emulator::Module*>(module)->entries) last_entries += entry.first + "\n";
  return last_entries.c_str();
}

int32_t emulator_parameter_count(void* module, const char* entry) {
  const emulator::Program* program = find(module, entry);
  return program ? static_cast<int32_t>(program->parameters.size()) : -1;
}

uint32_t emulator_parameter_size(void* module, const char* entry, int32_t index) {
  const emulator::Program* program = find(module, entry);
  return program && index >= 0 && static_cast<size_t>(index) < program->parameters.size() ? program->parameters[index].size : 0;
}

int32_t emulator_launch(void* module, const char* entry, const EmulatorLaunch* launch, uint64_t* instructions, double* seconds) {
  const emulator::Program* program = find(module, entry);
  if (!program) return 1;
  emulator::LaunchRequest request;
  std::memcpy(request.grid, launch->grid, sizeof request.grid);
  std::memcpy(request.cluster, launch->cluster, sizeof request.cluster);
  std::memcpy(request.block, launch->block, sizeof request.block);
  request.dynamic_shared = launch->dynamic_shared;
  std::string parameters(program->parameter_bytes, '\0');
  for (size_t i = 0; i < program->parameters.size(); ++i) {
    std::memcpy(&parameters[program->parameters[i].offset], launch->parameters[i], program->parameters[i].size);
  }
  request.parameters = reinterpret_cast<const uint8_t*>(parameters.data());
  for (size_t i = 0; i < launch->num_regions; ++i) {
    const EmulatorRegion& region = launch->regions[i];
    request.regions.push_back({region.name, static_cast<uint8_t*>(region.base), region.bytes, region.writable != 0});
  }
  emulator::Options& options = request.options;
  options.seed = launch->seed;
  options.host_threads = launch->host_threads;
  options.check_races = launch->check_races;
  options.strict_exit = launch->strict_exit;
  options.trace = launch->trace;
  options.instruction_limit = launch->instruction_limit;
  if (launch->num_sms > 0) options.num_sms = launch->num_sms;
  options.registers = launch->registers;
  options.eager_tensor_loads = launch->lenient_tensor;
  options.tensor_fences = !launch->lenient_tensor;
  emulator::LaunchResult result = emulator::launch(*program, request);
  if (instructions) *instructions = result.instructions;
  if (seconds) *seconds = result.seconds;
  last_trace = result.trace;
  last_error = result.error;
  return result.error.empty() ? 0 : 1;
}

const char* emulator_error(void) { return last_error.c_str(); }
const char* emulator_trace(void) { return last_trace.c_str(); }

int32_t emulator_encode_tiled(void* map, int32_t data_type, uint32_t rank, uint64_t address, const uint64_t* sizes,
                              const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int32_t interleave,
                              int32_t swizzle, int32_t l2_promotion, int32_t fill) {
  emulator::TensorMapBits bits;
  const char* why = "";
  int status = emulator::encode_tiled(&bits, data_type, rank, address, sizes, strides, box, element_strides, interleave, swizzle,
                                      l2_promotion, fill, &why);
  if (status != 0) last_error = why ? why : "";
  else std::memcpy(map, &bits, sizeof bits);
  return status;
}

}  // extern "C"
#pragma GCC visibility pop
