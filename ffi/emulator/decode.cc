// Decoding: operands, constants, special registers, the layout of registers and shared memory. See decode.h.
#include "decode.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace emulator {

std::string format(const char* pattern, ...) {
  va_list arguments;
  va_start(arguments, pattern);
  char buffer[4096];
  vsnprintf(buffer, sizeof buffer, pattern, arguments);
  va_end(arguments);
  return buffer;
}

struct Decoder::Context {
  struct Symbol {
    enum Kind { kParam, kShared, kLocal, kHost } kind;
    uint64_t value;  // byte offset, or host address
  };
  std::unordered_map<std::string_view, Symbol> symbols;
  std::vector<RegisterKind> kinds;
  std::vector<Slot> slots;
  std::unordered_map<uint64_t, Slot> constants32, constants64, special_rows;
  Slot constant_true = kNoSlot, constant_false = kNoSlot;
};

void Decoder::fail(const std::string& what) const {
  throw Fault(format("PTX line %u: '%s' %s", statement.line, std::string(statement.text).c_str(), what.c_str()));
}

void Decoder::allow(std::initializer_list<std::string_view> modifiers,
                    std::initializer_list<std::string_view> prefixes) const {
  for (size_t i = 1; i < statement.parts.size(); ++i) {
    bool known = false;
    for (auto m : modifiers) known |= m == statement.parts[i];
    for (auto p : prefixes) known |= statement.parts[i].substr(0, p.size()) == p;
    if (!known) fail("has an unknown modifier ." + std::string(statement.parts[i]));
  }
}

Slot Decoder::constant32(uint32_t bits) {
  auto [it, fresh] = context.constants32.try_emplace(bits, 0);
  if (fresh) {
    it->second = kConstantBit | static_cast<Slot>(program.constants.size() * 4);
    program.constants.insert(program.constants.end(), kLanes, bits);
  }
  return it->second;
}

Slot Decoder::constant64(uint64_t bits) {
  auto [it, fresh] = context.constants64.try_emplace(bits, 0);
  if (fresh) {
    it->second = kConstantBit | static_cast<Slot>(program.constants.size() * 4);
    for (int i = 0; i < kLanes; ++i) {
      program.constants.push_back(static_cast<uint32_t>(bits));
      program.constants.push_back(static_cast<uint32_t>(bits >> 32));
    }
  }
  return it->second;
}

Slot Decoder::constant_predicate(bool value) { return constant32(value ? kFullMask : 0); }

Slot Decoder::special(Special what, bool wide, uint32_t argument) {
  uint64_t key = static_cast<uint64_t>(what) << 33 | static_cast<uint64_t>(wide) << 32 | argument;
  auto [it, fresh] = context.special_rows.try_emplace(key, 0);
  if (fresh) {
    it->second = program.register_bytes;
    program.specials.push_back({it->second, what, wide, argument});
    program.register_bytes += wide ? 256 : 128;
  }
  return it->second;
}

namespace {

const std::unordered_map<std::string_view, Special>& special_names() {
  static const std::unordered_map<std::string_view, Special> names = {
      {"%tid.x", Special::kTidX}, {"%tid.y", Special::kTidY}, {"%tid.z", Special::kTidZ},
      {"%ntid.x", Special::kNtidX}, {"%ntid.y", Special::kNtidY}, {"%ntid.z", Special::kNtidZ},
      {"%ctaid.x", Special::kCtaidX}, {"%ctaid.y", Special::kCtaidY}, {"%ctaid.z", Special::kCtaidZ},
      {"%nctaid.x", Special::kNctaidX}, {"%nctaid.y", Special::kNctaidY}, {"%nctaid.z", Special::kNctaidZ},
      {"%laneid", Special::kLaneId}, {"%warpid", Special::kWarpId}, {"%nwarpid", Special::kNwarpId},
      {"%smid", Special::kSmId}, {"%nsmid", Special::kNsmId}, {"%gridid", Special::kGridId},
      {"%lanemask_eq", Special::kLanemaskEq}, {"%lanemask_le", Special::kLanemaskLe},
      {"%lanemask_lt", Special::kLanemaskLt}, {"%lanemask_ge", Special::kLanemaskGe},
      {"%lanemask_gt", Special::kLanemaskGt},
      {"%clusterid.x", Special::kClusterIdX}, {"%clusterid.y", Special::kClusterIdY},
      {"%clusterid.z", Special::kClusterIdZ}, {"%nclusterid.x", Special::kNclusterIdX},
      {"%nclusterid.y", Special::kNclusterIdY}, {"%nclusterid.z", Special::kNclusterIdZ},
      {"%cluster_ctaid.x", Special::kClusterCtaidX}, {"%cluster_ctaid.y", Special::kClusterCtaidY},
      {"%cluster_ctaid.z", Special::kClusterCtaidZ}, {"%cluster_nctaid.x", Special::kClusterNctaidX},
      {"%cluster_nctaid.y", Special::kClusterNctaidY}, {"%cluster_nctaid.z", Special::kClusterNctaidZ},
      {"%cluster_ctarank", Special::kClusterCtarank}, {"%cluster_nctarank", Special::kClusterNctarank},
      {"%is_explicit_cluster", Special::kIsExplicitCluster}, {"%dynamic_smem_size", Special::kDynamicSmemSize},
      {"%total_smem_size", Special::kTotalSmemSize},
  };
  return names;
}

}  // namespace

Slot Decoder::source(const Parsed& operand, int bits) {
  Slot slot = find(operand, bits);
  if (operand.kind == Parsed::kRegister) uses.push_back(slot);
  return slot;
}

Slot Decoder::find(const Parsed& operand, int bits) {
  bool wide = bits == 64;
  switch (operand.kind) {
    case Parsed::kRegister: {
      RegisterKind kind = context.kinds[operand.value];
      RegisterKind wanted = bits == 128 ? RegisterKind::k128 : wide ? RegisterKind::k64 : RegisterKind::k32;
      if (kind != wanted) fail("has a register of the wrong width: " + std::string(operand.name));
      return context.slots[operand.value];
    }
    case Parsed::kInteger:
      if (bits == 16) return constant32(static_cast<uint16_t>(operand.value));
      if (bits == 8) return constant32(static_cast<uint8_t>(operand.value));
      return wide ? constant64(operand.value) : constant32(static_cast<uint32_t>(operand.value));
    case Parsed::kFloat32:
      return wide ? constant64(operand.value) : constant32(static_cast<uint32_t>(operand.value));
    case Parsed::kFloat64:
      return wide ? constant64(operand.value) : constant32(as_bits(static_cast<float>(as_double(operand.value))));
    case Parsed::kSpecial: {
      if (operand.name == "WARP_SZ") return constant32(32);
      auto found = special_names().find(operand.name);
      if (found == special_names().end()) fail("reads an unknown special register " + std::string(operand.name));
      if (wide && found->second != Special::kGridId) fail("has a special register of the wrong width");
      return special(found->second, wide);
    }
    case Parsed::kSymbol: {
      if (operand.name == "WARP_SZ") return constant32(32);
      auto found = context.symbols.find(operand.name);
      if (found == context.symbols.end()) fail("names an unknown symbol " + std::string(operand.name));
      uint64_t value = found->second.value + operand.value;
      switch (found->second.kind) {
        case Context::Symbol::kParam:
          if (!wide) fail("takes the address of a parameter into 32 bits");
          return special(Special::kParamAddress, true, static_cast<uint32_t>(value));
        case Context::Symbol::kShared: return special(Special::kSharedAddress, wide, static_cast<uint32_t>(value));
        case Context::Symbol::kLocal: return special(Special::kLocalAddress, wide, static_cast<uint32_t>(value));
        case Context::Symbol::kHost:
          if (!wide) fail("takes a global address into 32 bits");
          return constant64(value);
      }
      break;
    }
    default: break;
  }
  fail("has an operand of the wrong kind");
}

Slot Decoder::destination(const Parsed& operand, int bits) {
  if (operand.kind == Parsed::kSink) return kNoSlot;
  if (operand.kind != Parsed::kRegister) fail("writes something that is no register");
  Slot slot = find(operand, bits);
  definitions.push_back(slot);
  return slot;
}

bool Decoder::is_predicate(const Parsed& operand) const {
  return operand.kind == Parsed::kRegister && context.kinds[operand.value] == RegisterKind::kPredicate;
}

Slot Decoder::predicate_source(const Parsed& operand) {
  if (operand.kind == Parsed::kInteger) return constant_predicate((operand.value != 0) != operand.negated);
  if (!is_predicate(operand)) fail("expects a predicate");
  return context.slots[operand.value] | (operand.negated ? kNegatedBit : 0);
}

Slot Decoder::predicate_destination(const Parsed& operand) {
  if (operand.kind == Parsed::kSink) return kNoSlot;
  if (!is_predicate(operand)) fail("expects a predicate");
  return context.slots[operand.value];
}

bool Decoder::is_wide(const Parsed& operand) const {
  if (operand.kind == Parsed::kRegister) return context.kinds[operand.value] == RegisterKind::k64;
  if (operand.kind == Parsed::kSymbol) {
    auto found = context.symbols.find(operand.name);
    return found != context.symbols.end() && (found->second.kind == Context::Symbol::kParam ||
                                              found->second.kind == Context::Symbol::kHost);
  }
  return operand.kind == Parsed::kInteger && operand.value >> 32 != 0;
}

int64_t Decoder::integer(const Parsed& operand) const {
  if (operand.kind != Parsed::kInteger) fail("expects a constant");
  return operand.value;
}

bool Decoder::address(const Parsed& operand, Slot* base, int64_t* offset) {
  if (operand.kind != Parsed::kAddress) fail("expects an address");
  const Parsed& register_ = operand.elements[0];
  bool wide = is_wide(register_);
  *base = source(register_, wide ? 64 : 32);
  *offset = operand.value;
  return wide;
}

uint32_t Decoder::append(const std::vector<Slot>& slots) {
  uint32_t first = static_cast<uint32_t>(program.lists.size());
  program.lists.insert(program.lists.end(), slots.begin(), slots.end());
  return first;
}

std::vector<Slot> Decoder::slots_of(const Parsed& operand, int bits, bool write) {
  std::vector<Slot> slots;
  auto add = [&](const Parsed& element) { slots.push_back(write ? destination(element, bits) : source(element, bits)); };
  if (operand.kind == Parsed::kVector) {
    for (const Parsed& element : operand.elements) add(element);
  } else {
    add(operand);
  }
  return slots;
}

void Decoder::sources(const Parsed& operand, int bits) {
  std::vector<Slot> slots = slots_of(operand, bits, false);
  in.list = append(slots);
  in.count = static_cast<uint16_t>(slots.size());
}

void Decoder::destinations(const Parsed& operand, int bits) {
  std::vector<Slot> slots = slots_of(operand, bits, true);
  in.list = append(slots);
  in.count = static_cast<uint16_t>(slots.size());
}

// ---- a whole entry -------------------------------------------------------------------------------------------------------

namespace {

uint32_t align_up(uint32_t value, uint32_t alignment) { return (value + alignment - 1) / alignment * alignment; }

const Families& families() {
  static const Families all = [] {
    Families f;
    register_integer(f);
    register_float(f);
    register_move(f);
    register_warp(f);
    register_memory(f);
    register_control(f);
    register_mbarrier(f);
    register_bulk(f);
    register_matrix(f);
    register_tensor(f);
    return f;
  }();
  return all;
}

// Row addresses. Predicates first, then rows in the order of declaration.
void lay_out_registers(Program& program, Decoder::Context& context) {
  uint32_t bytes = 0;
  context.slots.resize(context.kinds.size());
  for (size_t i = 0; i < context.kinds.size(); ++i) {
    if (context.kinds[i] == RegisterKind::kPredicate) context.slots[i] = bytes, bytes += 4;
  }
  bytes = align_up(bytes, 64);
  for (size_t i = 0; i < context.kinds.size(); ++i) {
    if (context.kinds[i] == RegisterKind::kPredicate) continue;
    context.slots[i] = bytes;
    bytes += context.kinds[i] == RegisterKind::k32 ? 128 : context.kinds[i] == RegisterKind::k64 ? 256 : 512;
  }
  program.register_bytes = bytes;
}

void lay_out_memory(Module& module, const ParsedModule& parsed, const ParsedEntry& entry, Program& program,
                    Decoder::Context& context) {
  using Symbol = Decoder::Context::Symbol;
  for (const Variable& p : entry.parameters) {
    program.parameter_bytes = align_up(program.parameter_bytes, p.align);
    program.parameters.push_back({std::string(p.name), program.parameter_bytes, static_cast<uint32_t>(p.size), p.align});
    context.symbols[p.name] = {Symbol::kParam, program.parameter_bytes};
    program.parameter_bytes += static_cast<uint32_t>(p.size);
  }
  uint32_t dynamic_align = 16;
  std::vector<const Variable*> dynamic;
  auto place = [&](const Variable& v) {
    if (v.space == "shared" && (v.is_extern || v.size == 0)) {
      dynamic.push_back(&v);
      dynamic_align = std::max(dynamic_align, v.align);
    } else if (v.space == "shared") {
      program.static_shared = align_up(program.static_shared, v.align);
      context.symbols[v.name] = {Symbol::kShared, program.static_shared};
      program.static_shared += static_cast<uint32_t>(v.size);
    } else if (v.space == "local") {
      program.local_bytes = align_up(program.local_bytes, v.align);
      context.symbols[v.name] = {Symbol::kLocal, program.local_bytes};
      program.local_bytes += static_cast<uint32_t>(v.size);
    } else {
      std::vector<uint8_t> bytes = v.initial;
      bytes.resize(align_up(static_cast<uint32_t>(v.size) + 1, 16));
      module.globals.push_back(std::move(bytes));
      context.symbols[v.name] = {Symbol::kHost, reinterpret_cast<uint64_t>(module.globals.back().data())};
    }
  };
  for (const Variable& v : parsed.variables) place(v);
  for (const Variable& v : entry.variables) place(v);
  program.dynamic_offset = align_up(program.static_shared, dynamic_align);
  for (const Variable* v : dynamic) context.symbols[v->name] = {Symbol::kShared, program.dynamic_offset};
}

std::unique_ptr<Program> decode_entry(Module& module, const ParsedModule& parsed, const ParsedEntry& entry) {
  auto program = std::make_unique<Program>();
  program->entry = entry.name;
  std::memcpy(program->required_threads, entry.required_threads, sizeof entry.required_threads);
  std::memcpy(program->required_cluster, entry.required_cluster, sizeof entry.required_cluster);
  program->max_registers = entry.max_registers;
  Decoder::Context context;
  context.kinds = entry.registers;
  lay_out_registers(*program, context);
  lay_out_memory(module, parsed, entry, *program, context);

  std::unordered_map<std::string_view, uint16_t> opcode_ids;
  program->code.resize(entry.statements.size() + 1);
  for (size_t i = 0; i < entry.statements.size(); ++i) {
    const Statement& statement = entry.statements[i];
    Instruction& in = program->code[i];
    in.line = statement.line;
    auto [id, fresh] = opcode_ids.try_emplace(statement.opcode, static_cast<uint16_t>(opcode_ids.size()));
    if (fresh) program->opcodes.emplace_back(statement.opcode);
    in.opcode = id->second;
    program->text.push_back(statement.text);
    Decoder decoder(statement, in, *program, context);
    if (statement.guard >= 0) {
      in.guard = context.slots[statement.guard] | (statement.guard_negated ? kNegatedBit : 0);
    }
    in.converge = statement.has("sync") || statement.has("aligned");
    auto family = families().find(statement.parts[0]);
    if (family == families().end()) decoder.fail("is not an instruction known here");
    family->second(decoder);
    if (in.execute == nullptr) decoder.fail("is a form not known here");
    in.accesses = static_cast<uint32_t>(program->accesses.size());
    in.num_uses = static_cast<uint16_t>(decoder.uses.size());
    in.num_definitions = static_cast<uint16_t>(decoder.definitions.size());
    program->accesses.insert(program->accesses.end(), decoder.uses.begin(), decoder.uses.end());
    program->accesses.insert(program->accesses.end(), decoder.definitions.begin(), decoder.definitions.end());
  }
  // Falling off the end is an exit.
  static const std::string end = "ret;";
  static const Statement last = [] {
    Statement s;
    s.opcode = "ret";
    s.parts = {"ret"};
    s.text = end;
    return s;
  }();
  Instruction& in = program->code.back();
  in.opcode = opcode_ids.try_emplace("ret", static_cast<uint16_t>(opcode_ids.size())).first->second;
  if (in.opcode == program->opcodes.size()) program->opcodes.push_back("ret");
  in.line = entry.statements.empty() ? entry.line : entry.statements.back().line;
  program->text.push_back(end);
  Decoder decoder(last, in, *program, context);
  families().at("ret")(decoder);
  return program;
}

}  // namespace

std::unique_ptr<Module> load_module(std::string ptx) {
  auto module = std::make_unique<Module>();
  while (!ptx.empty() && ptx.back() == '\0') ptx.pop_back();
  module->source = std::move(ptx);
  ParsedModule parsed = parse_ptx(module->source);
  module->version = std::string(parsed.version);
  module->target = std::string(parsed.target);
  for (const ParsedEntry& entry : parsed.entries) {
    module->entries[entry.name] = decode_entry(*module, parsed, entry);
  }
  return module;
}

}  // namespace emulator
