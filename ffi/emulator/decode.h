// Statements to instructions: what each family of instructions shares when it is decoded.
//
// PTX ISA: "Instruction Operands". Each execute_*.cc file registers decoders by the first word of the opcode ("ld",
// "mbarrier", ...). A decoder reads the modifiers, asks for the slots of its operands and chooses the function to run.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_map>

#include "parser.h"
#include "program.h"

namespace emulator {

class Decoder {
 public:
  const Statement& statement;
  Instruction& in;
  Program& program;

  [[noreturn]] void fail(const std::string& what) const;
  size_t operands() const { return statement.operands.size(); }
  const Parsed& operand(size_t i) const {
    if (i >= statement.operands.size()) fail("has too few operands");
    return statement.operands[i];
  }
  std::string_view part(size_t i) const { return i < statement.parts.size() ? statement.parts[i] : std::string_view(); }
  std::string_view last_part() const { return statement.parts.back(); }
  bool has(std::string_view modifier) const { return statement.has(modifier); }
  bool has_any(std::initializer_list<std::string_view> modifiers) const {
    for (auto m : modifiers) if (has(m)) return true;
    return false;
  }
  // Modifiers must all be among the known ones; a decoder calls this so that nothing is silently ignored.
  void allow(std::initializer_list<std::string_view> modifiers, std::initializer_list<std::string_view> prefixes = {}) const;

  // Values. `bits` is the width of the type: 64 and 128 are wide rows, everything else is a 32-bit row.
  Slot source(const Parsed& operand, int bits);
  Slot find(const Parsed& operand, int bits);         // without counting as a use
  Slot destination(const Parsed& operand, int bits);  // kNoSlot for `_`
  Slot predicate_source(const Parsed& operand);       // a predicate register (may be negated) or an integer
  Slot predicate_destination(const Parsed& operand);
  bool is_wide(const Parsed& operand) const;          // a 64-bit register or the address of a parameter or variable
  bool is_predicate(const Parsed& operand) const;
  int64_t integer(const Parsed& operand) const;       // must be a constant

  // [base + offset] into in.a, in.immediate; true when the base is 64 bits wide.
  bool address(const Parsed& operand) { return address(operand, &in.a, &in.immediate); }
  bool address(const Parsed& operand, Slot* base, int64_t* offset);

  // The elements of {...} (or the one operand) as a list in the program: in.list, in.count.
  void sources(const Parsed& operand, int bits);
  void destinations(const Parsed& operand, int bits);
  uint32_t append(const std::vector<Slot>& slots);
  std::vector<Slot> slots_of(const Parsed& operand, int bits, bool write);

  Slot constant32(uint32_t bits);
  Slot constant64(uint64_t bits);
  Slot constant_predicate(bool value);
  Slot special(Special what, bool wide, uint32_t argument = 0);

  template <class T>
  const T* keep(T value) {
    auto kept = std::make_shared<const T>(std::move(value));
    program.specifications.push_back(kept);
    return kept.get();
  }

  std::vector<Slot> uses, definitions;  // registers named so far (no predicates)

  struct Context;  // symbols and registers of the entry
  Context& context;
  Decoder(const Statement& s, Instruction& i, Program& p, Context& c) : statement(s), in(i), program(p), context(c) {}
};

using Decode = void (*)(Decoder&);
using Families = std::unordered_map<std::string_view, Decode>;

void register_integer(Families&);     // execute_integer.cc
void register_float(Families&);       // execute_float.cc
void register_move(Families&);        // execute_move.cc: mov, cvta, mapa, isspacep
void register_warp(Families&);        // execute_warp.cc: shfl, vote, match, redux, elect
void register_memory(Families&);      // execute_memory.cc: ld, st, ldmatrix, stmatrix
void register_atomics(Families&);     // execute_atomics.cc: atom, red
void register_control(Families&);     // execute_control.cc: bra, barriers, fences, setmaxnreg
void register_mbarrier(Families&);    // mbarrier.cc
void decode_store_async(Decoder&);    // st.async, red.async
void register_bulk(Families&);        // execute_bulk.cc: cp.async, cp.async.bulk, tensor copies
void register_matrix(Families&);      // execute_wgmma.cc: wgmma, mma.sync
void register_tensor(Families&);      // execute_tcgen05.cc

inline int type_bits(std::string_view type) {  // "b32", "f16x2", "pred" (1)
  if (type == "pred") return 1;
  int bits = 0;
  size_t i = 0;
  while (i < type.size() && (type[i] < '0' || type[i] > '9')) ++i;
  if (i == 0) return 0;
  while (i < type.size() && type[i] >= '0' && type[i] <= '9') bits = bits * 10 + (type[i++] - '0');
  if (type.substr(i) == "x2") bits *= 2;
  return bits;
}

}  // namespace emulator
