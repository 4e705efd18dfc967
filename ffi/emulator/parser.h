// PTX text to statements.
//
// PTX ISA: "Syntax" (source format, comments, statements, identifiers, constants), "Directives". Names are resolved here,
// because registers and labels are scoped by braces; what an instruction means is left to decode.h.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace emulator {

enum class RegisterKind : uint8_t { kPredicate, k32, k64, k128 };  // narrower ones live in 32 bits

struct Parsed {
  enum Kind : uint8_t {
    kRegister,  // value = register id
    kSpecial,   // name = "%tid.x"
    kSymbol,    // name of a variable or parameter; value = byte offset added to it
    kLabel,     // value = instruction index once resolved
    kInteger,   // value
    kFloat32, kFloat64,  // value = bits
    kVector,    // elements
    kAddress,   // elements[0] = base (register, symbol or integer), value = offset; elements[1...] further operands
    kPair,      // d|p
    kSink,      // _
  } kind = kInteger;
  bool negated = false;
  int64_t value = 0;
  std::string_view name;
  std::vector<Parsed> elements;
};

struct Statement {
  uint32_t line = 0;
  std::string_view text;
  std::string_view opcode;             // with all dotted parts
  std::vector<std::string_view> parts; // opcode split at the dots; "shared::cta" is one part
  int32_t guard = -1;                  // register id
  bool guard_negated = false;
  std::vector<Parsed> operands;

  // True (and the part counts as read) when a modifier is present.
  bool has(std::string_view part) const {
    for (size_t i = 1; i < parts.size(); ++i) {
      if (parts[i] == part) return true;
    }
    return false;
  }
};

struct Variable {
  std::string_view name;
  std::string space;         // "shared", "global", "const", "local", "param"
  uint64_t size = 0;         // 0 for an unsized extern array
  uint32_t align = 1;
  bool is_extern = false;
  std::vector<uint8_t> initial;
};

struct ParsedEntry {
  std::string name;
  uint32_t line = 0;
  std::vector<Variable> parameters;
  std::vector<Variable> variables;   // .shared and .local of the body
  std::vector<RegisterKind> registers;
  std::vector<Statement> statements;
  uint32_t required_threads[3] = {0, 0, 0};
  uint32_t required_cluster[3] = {0, 0, 0};
  uint32_t max_registers = 0;
};

struct ParsedModule {
  std::string_view version, target;
  std::vector<Variable> variables;
  std::vector<ParsedEntry> entries;
};

// Views in the result point into `source`. Throws Fault.
ParsedModule parse_ptx(const std::string& source);

}  // namespace emulator
