// Counts of what a grid did: instructions of each opcode for each warp of the CTA (its role), bytes of each memory, products,
// and which lines never ran.
// A cycle model can be laid over these numbers.
#include "trace.h"

#include <algorithm>

namespace emulator {

void Trace::add(const Cluster& cluster) {
  for (const auto& cta : cluster.ctas) {
    ++ctas_;
    if (warps_.size() < cta->warps.size()) warps_.resize(cta->warps.size(), std::vector<uint64_t>(program_.code.size()));
    for (const Warp& w : cta->warps) {
      for (size_t i = 0; i < w.counts.size(); ++i) warps_[w.index][i] += w.counts[i];
    }
    const Counters& c = cta->counters;
    total_.global_read += c.global_read;
    total_.global_written += c.global_written;
    total_.shared_read += c.shared_read;
    total_.shared_written += c.shared_written;
    total_.tma_loaded += c.tma_loaded;
    total_.tma_stored += c.tma_stored;
    total_.bulk_copied += c.bulk_copied;
    total_.tensor_read += c.tensor_read;
    total_.tensor_written += c.tensor_written;
    total_.wgmma += c.wgmma;
    total_.tensor_mma += c.tensor_mma;
    total_.mma_flop += c.mma_flop;
    busiest_ = std::max(busiest_, c.mma_flop);
  }
}

std::string Trace::json(double seconds) const {
  auto number = [](uint64_t value) { return std::to_string(value); };
  std::string out = "{\n  \"kernel\": \"" + program_.entry + "\",\n  \"ctas\": " + number(ctas_);
  uint64_t instructions = 0;
  for (const auto& warp : warps_) for (uint64_t count : warp) instructions += count;
  out += ",\n  \"warp_instructions\": " + number(instructions) + ",\n  \"seconds\": " + format("%.6f", seconds);
  const std::pair<const char*, uint64_t> fields[] = {
      {"global_bytes_read", total_.global_read}, {"global_bytes_written", total_.global_written},
      {"shared_bytes_read", total_.shared_read}, {"shared_bytes_written", total_.shared_written},
      {"tma_bytes_loaded", total_.tma_loaded}, {"tma_bytes_stored", total_.tma_stored},
      {"bulk_bytes_copied", total_.bulk_copied}, {"tensor_memory_bytes_read", total_.tensor_read},
      {"tensor_memory_bytes_written", total_.tensor_written}, {"wgmma", total_.wgmma}, {"tcgen05_mma", total_.tensor_mma},
      {"mma_flop", total_.mma_flop}, {"mma_flop_of_busiest_cta", busiest_}};
  for (const auto& [name, value] : fields) out += format(",\n  \"%s\": %llu", name, static_cast<unsigned long long>(value));
  out += ",\n  \"warps\": [";
  for (size_t w = 0; w < warps_.size(); ++w) {
    out += w ? ",\n    {" : "\n    {";
    std::vector<uint64_t> opcodes(program_.opcodes.size());
    for (size_t i = 0; i < warps_[w].size(); ++i) opcodes[program_.code[i].opcode] += warps_[w][i];
    bool first = true;
    for (size_t i = 0; i < opcodes.size(); ++i) {
      if (!opcodes[i]) continue;
      out += (first ? "\"" : ", \"") + program_.opcodes[i] + "\": " + number(opcodes[i]);
      first = false;
    }
    out += "}";
  }
  // Coverage: PTX lines that no warp executed.
  out += "\n  ],\n  \"unexecuted_lines\": [";
  bool first = true;
  for (size_t i = 0; i + 1 < program_.code.size(); ++i) {
    bool executed = false;
    for (const auto& warp : warps_) executed |= warp[i] != 0;
    if (executed) continue;
    out += (first ? "" : ", ") + number(program_.code[i].line);
    first = false;
  }
  return out + "]\n}\n";
}

}  // namespace emulator
