// A PTX module after decoding: what the machine executes.
//
// PTX ISA: "PTX Machine Model", "Syntax", "State Spaces, Types, and Variables". A module is parsed (parser.h) into
// statements, and each statement is decoded once (decode.h) into an Instruction: a function pointer and the places of its
// operands. A register is a row of 32 lanes (formats.h), so that one host loop executes one warp instruction.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "arithmetic.h"
#include "formats.h"

namespace emulator {

struct Warp;
struct Instruction;
using Execute = void (*)(Warp&, const Instruction&, uint32_t mask);

// Where an operand lives: a byte offset from the warp's register file, or, with kConstantBit, from the program's constant
// pool. Rows of 32 lanes; a predicate is one uint32_t with a bit for each lane.
using Slot = uint32_t;
constexpr Slot kConstantBit = 0x80000000u;
constexpr Slot kNegatedBit = 0x40000000u;  // predicates only: `!%p`
constexpr Slot kNoSlot = 0x3fffffffu;
constexpr uint32_t kFullMask = 0xffffffffu;

enum class Space : uint8_t { kGeneric, kGlobal, kShared, kSharedCluster, kLocal, kParam, kConst };

struct Instruction {
  Execute execute = nullptr;
  Slot guard = kNoSlot;   // with kNegatedBit for @!p
  uint32_t line = 0;      // in the PTX text
  uint16_t opcode = 0;    // index into Program::opcodes
  bool converge = false;  // .sync or .aligned: every live lane (or those of the member mask `members`) takes part
  uint8_t size = 0;       // bytes of an element in memory
  Slot members = kNoSlot;

  Slot d = kNoSlot, e = kNoSlot;  // results
  Slot a = kNoSlot, b = kNoSlot, c = kNoSlot, p = kNoSlot;
  int64_t immediate = 0;          // address offset, branch target or what the family says
  uint32_t list = 0;              // first of `count` operands of a vector, in Program::lists
  uint16_t count = 0;
  uint8_t option[6] = {};         // what the family says
  uint32_t accesses = 0;          // registers read, then written, in Program::accesses; not of asynchronous instructions
  uint16_t num_uses = 0, num_definitions = 0;
  union {
    FloatFunction float_function;
    CompareFunction compare;
    ConvertFunction convert;
    const void* extra = nullptr;  // a decoded specification owned by Program::specifications
  };
};

// Rows of the register file that the machine fills in when a warp starts.
enum class Special : uint8_t {
  kTidX, kTidY, kTidZ, kNtidX, kNtidY, kNtidZ, kCtaidX, kCtaidY, kCtaidZ, kNctaidX, kNctaidY, kNctaidZ,
  kLaneId, kWarpId, kNwarpId, kSmId, kNsmId, kGridId,
  kLanemaskEq, kLanemaskLe, kLanemaskLt, kLanemaskGe, kLanemaskGt,
  kClusterIdX, kClusterIdY, kClusterIdZ, kNclusterIdX, kNclusterIdY, kNclusterIdZ,
  kClusterCtaidX, kClusterCtaidY, kClusterCtaidZ, kClusterNctaidX, kClusterNctaidY, kClusterNctaidZ,
  kClusterCtarank, kClusterNctarank, kIsExplicitCluster, kDynamicSmemSize, kTotalSmemSize,
  kParamAddress,   // host address of the parameter at byte `argument`
  kSharedAddress,  // shared address of the variable at byte `argument` of the CTA's window
  kLocalAddress,   // byte `argument` of the lane's local memory
};

struct SpecialRow {
  Slot slot;
  Special special;
  bool wide;  // 64-bit row
  uint32_t argument;
};

struct Parameter {
  std::string name;
  uint32_t offset, size, align;
};

// Shared memory starts here: the lowest KiB belongs to the system, and a null address is caught.
constexpr uint32_t kSharedBase = 1024;

struct Program {
  std::string entry;
  std::vector<Instruction> code;
  std::vector<Slot> lists;
  std::vector<Slot> accesses;
  std::vector<std::string> opcodes;
  std::vector<std::string_view> text;  // of each instruction, for messages
  std::vector<uint32_t> constants;     // the pool, kept aligned by `constant_base`
  std::vector<SpecialRow> specials;
  std::deque<std::shared_ptr<const void>> specifications;
  uint32_t register_bytes = 0;
  std::vector<Parameter> parameters;
  uint32_t parameter_bytes = 0;
  uint32_t static_shared = 0;   // bytes from kSharedBase
  uint32_t dynamic_offset = 0;  // where extern shared memory starts, from kSharedBase
  uint32_t local_bytes = 0;     // for each lane
  uint32_t required_threads[3] = {0, 0, 0};    // .reqntid
  uint32_t required_cluster[3] = {0, 0, 0};    // .reqnctapercluster
  uint32_t max_registers = 0;                  // .maxnreg
  bool global_float_atomics = false;           // the order of CTAs can change the results
  bool uses_tensor_memory = false;
};

struct Module {
  std::string source;
  std::string target;   // "sm_90a"
  std::string version;  // "9.4"
  std::map<std::string, std::unique_ptr<Program>> entries;
  std::deque<std::vector<uint8_t>> globals;  // module-scope .global and .const variables
};

// An error of the program under execution or of its text. The scheduler adds where it happened.
struct Fault : std::exception {
  explicit Fault(std::string message) : text(std::move(message)) {}
  const char* what() const noexcept override { return text.c_str(); }
  std::string text;
};

// printf into a string.
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

// Throws Fault with the PTX line when the text is not understood.
std::unique_ptr<Module> load_module(std::string ptx);

}  // namespace emulator
