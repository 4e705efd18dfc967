// PTX text to statements: lexer, declarations, scopes and operands. See parser.h.
#include "parser.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "program.h"

namespace emulator {
namespace {

bool is_identifier_start(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%'; }
bool is_identifier(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%'; }

struct Scope {
  std::unordered_map<std::string, int> registers;                    // name -> id
  std::unordered_map<std::string, std::pair<int, int>> ranges;       // prefix of `%r<N>` -> first id, N
  std::unordered_map<std::string_view, uint32_t> labels;
  std::vector<std::pair<uint32_t, std::string_view>> branches;       // statements whose label is not known yet
};

class Parser {
 public:
  explicit Parser(const std::string& source) : begin_(source.data()), at_(begin_), end_(begin_ + source.size()) {}

  ParsedModule parse() {
    while (skip_space(), at_ < end_) {
      if (*at_ != '.') fail("expected a directive");
      std::string_view directive = read_directive();
      if (directive == ".version") {
        module_.version = read_word();
      } else if (directive == ".target") {
        module_.target = read_word();
        skip_line();
      } else if (directive == ".address_size" || directive == ".file" || directive == ".loc") {
        skip_line();
      } else if (directive == ".section") {
        skip_braces();
      } else if (directive == ".pragma") {
        skip_past(';');
      } else {
        parse_linkage(directive);
      }
    }
    return std::move(module_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Fault(format("PTX line %u: %s near '%.40s'", line_, what.c_str(),
                       std::string(at_, std::min<size_t>(40, end_ - at_)).c_str()));
  }

  // ---- lexer ----
  void skip_space() {
    while (at_ < end_) {
      if (*at_ == '\n') {
        ++line_, ++at_;
      } else if (std::isspace(static_cast<unsigned char>(*at_))) {
        ++at_;
      } else if (at_[0] == '/' && at_ + 1 < end_ && at_[1] == '/') {
        while (at_ < end_ && *at_ != '\n') ++at_;
      } else if (at_[0] == '/' && at_ + 1 < end_ && at_[1] == '*') {
        at_ += 2;
        while (at_ + 1 < end_ && !(at_[0] == '*' && at_[1] == '/')) line_ += *at_++ == '\n';
        at_ += 2;
      } else {
        break;
      }
    }
  }
  void skip_line() { while (at_ < end_ && *at_ != '\n') ++at_; }
  void skip_past(char c) {
    while (at_ < end_ && *at_ != c) line_ += *at_++ == '\n';
    if (at_ < end_) ++at_;
  }
  void skip_braces() {
    skip_past('{');
    for (int depth = 1; at_ < end_ && depth > 0; ++at_) {
      if (*at_ == '{') ++depth;
      if (*at_ == '}') --depth;
      line_ += *at_ == '\n';
    }
  }
  bool accept(char c) {
    skip_space();
    if (at_ < end_ && *at_ == c) return ++at_, true;
    return false;
  }
  void expect(char c) {
    if (!accept(c)) fail(format("expected '%c'", c));
  }
  bool next_is(char c) { return skip_space(), at_ < end_ && *at_ == c; }
  std::string_view read_while(bool (*good)(char)) {
    const char* start = at_;
    while (at_ < end_ && good(*at_)) ++at_;
    return {start, static_cast<size_t>(at_ - start)};
  }
  std::string_view read_directive() {
    skip_space();
    const char* start = at_++;
    while (at_ < end_ && (is_identifier(*at_) || (at_[0] == ':' && at_[1] == ':' && ++at_))) ++at_;
    return {start, static_cast<size_t>(at_ - start)};
  }
  std::string_view read_word() {
    skip_space();
    return read_while([](char c) { return is_identifier(c) || c == '.'; });
  }
  std::string_view read_identifier() {
    skip_space();
    if (at_ >= end_ || !is_identifier_start(*at_)) fail("expected a name");
    return read_while(is_identifier);
  }
  int64_t read_integer() {
    Parsed number = read_number();
    if (number.kind != Parsed::kInteger) fail("expected an integer");
    return number.value;
  }
  Parsed read_number() {
    skip_space();
    Parsed result;
    bool negative = false;
    while (at_ < end_ && (*at_ == '-' || *at_ == '+')) negative ^= *at_++ == '-';
    skip_space();
    if (at_ + 1 < end_ && at_[0] == '0' && (at_[1] == 'f' || at_[1] == 'F' || at_[1] == 'd' || at_[1] == 'D')) {
      bool single = at_[1] == 'f' || at_[1] == 'F';
      at_ += 2;
      const char* start = at_;
      result.value = static_cast<int64_t>(std::strtoull(std::string(start, single ? 8 : 16).c_str(), nullptr, 16));
      at_ += single ? 8 : 16;
      result.kind = single ? Parsed::kFloat32 : Parsed::kFloat64;
      if (negative) result.value ^= single ? int64_t{0x80000000} : INT64_MIN;
      return result;
    }
    const char* scan = at_;
    while (scan < end_ && std::isdigit(static_cast<unsigned char>(*scan))) ++scan;
    if (scan < end_ && (*scan == '.' || *scan == 'e' || *scan == 'E') && at_[0] >= '0' && at_[0] <= '9' &&
        !(at_[0] == '0' && (at_[1] == 'x' || at_[1] == 'X'))) {
      char* stop = nullptr;
      double value = std::strtod(at_, &stop);
      at_ = stop;
      result.kind = Parsed::kFloat64;
      result.value = static_cast<int64_t>(as_bits(negative ? -value : value));
      return result;
    }
    if (at_ >= end_ || !std::isdigit(static_cast<unsigned char>(*at_))) fail("expected a number");
    char* stop = nullptr;
    uint64_t value = 0;
    if (at_[0] == '0' && (at_[1] == 'b' || at_[1] == 'B')) {
      value = std::strtoull(at_ + 2, &stop, 2);
    } else {
      value = std::strtoull(at_, &stop, 0);
    }
    at_ = stop;
    if (at_ < end_ && *at_ == 'U') ++at_;
    result.value = static_cast<int64_t>(negative ? 0 - value : value);
    return result;
  }

  // ---- declarations ----
  static uint32_t type_bytes(std::string_view type) {
    if (type.size() < 3) return 0;
    return static_cast<uint32_t>(std::atoi(std::string(type.substr(2)).c_str())) / 8;
  }
  static bool is_type(std::string_view word) {
    return word.size() >= 3 && (word[1] == 'b' || word[1] == 'u' || word[1] == 's' || word[1] == 'f') &&
           std::isdigit(static_cast<unsigned char>(word[2]));
  }

  void parse_linkage(std::string_view directive) {
    bool is_extern = false;
    while (directive == ".visible" || directive == ".extern" || directive == ".weak" || directive == ".common") {
      is_extern |= directive == ".extern";
      directive = read_directive();
    }
    if (directive == ".entry") {
      parse_entry();
    } else if (directive == ".func" || directive == ".alias") {
      // Device functions are not called by kernels that this machine runs; a call is refused when it is decoded.
      while (at_ < end_ && *at_ != ';' && *at_ != '{') line_ += *at_++ == '\n';
      if (*at_ == '{') skip_braces(); else ++at_;
    } else if (directive == ".global" || directive == ".const" || directive == ".shared") {
      Variable variable = parse_variable(directive.substr(1));
      variable.is_extern = is_extern;
      module_.variables.push_back(std::move(variable));
    } else {
      fail("unknown directive " + std::string(directive));
    }
  }

  // After the space directive: `.align 16 .b8 name[4][8] = {...}`. Ends behind the semicolon, except for parameters.
  Variable parse_variable(std::string_view space) {
    Variable variable;
    variable.space = space;
    uint32_t element = 0, vector = 1;
    while (next_is('.')) {
      std::string_view word = read_directive();
      if (word == ".align") {
        variable.align = static_cast<uint32_t>(read_integer());
      } else if (word == ".v2" || word == ".v4") {
        vector = word[2] - '0';
      } else if (is_type(word)) {
        element = type_bytes(word);
      } else if (word == ".ptr" || word == ".global" || word == ".shared" || word == ".const" || word == ".attribute" ||
                 word == ".unified") {
        if (accept('(')) skip_past(')');
      } else {
        fail("unknown attribute " + std::string(word) + " of a variable");
      }
    }
    variable.name = read_identifier();
    variable.size = uint64_t{element} * vector;
    variable.align = std::max({variable.align, element, 1u});
    while (accept('[')) {
      variable.size *= next_is(']') ? 0 : static_cast<uint64_t>(read_integer());
      expect(']');
    }
    if (space == "param") return variable;
    if (accept('=')) {
      std::vector<uint8_t>& bytes = variable.initial;
      auto append = [&] {
        Parsed number = read_number();
        int64_t value = number.value;
        if (number.kind == Parsed::kFloat64 && element == 4) value = as_bits(static_cast<float>(as_double(value)));
        const uint8_t* raw = reinterpret_cast<const uint8_t*>(&value);
        bytes.insert(bytes.end(), raw, raw + element);
      };
      if (accept('{')) {
        do append(); while (accept(','));
        expect('}');
      } else {
        append();
      }
    }
    expect(';');
    return variable;
  }

  void parse_entry() {
    module_.entries.emplace_back();
    entry_ = &module_.entries.back();
    entry_->line = line_;
    entry_->name = std::string(read_identifier());
    if (accept('(') && !accept(')')) {
      do {
        if (read_directive() != ".param") fail("expected .param");
        entry_->parameters.push_back(parse_variable("param"));
      } while (accept(','));
      expect(')');
    }
    while (next_is('.')) {
      std::string_view directive = read_directive();
      if (directive == ".pragma") {
        skip_past(';');
        continue;
      }
      uint32_t values[3] = {1, 1, 1};
      int count = 0;
      if (skip_space(), at_ < end_ && (std::isdigit(static_cast<unsigned char>(*at_)))) {
        do values[count++ % 3] = static_cast<uint32_t>(read_integer()); while (accept(','));
      }
      if (directive == ".reqntid") std::memcpy(entry_->required_threads, values, sizeof values);
      if (directive == ".reqnctapercluster") std::memcpy(entry_->required_cluster, values, sizeof values);
      if (directive == ".maxnreg") entry_->max_registers = values[0];
    }
    expect('{');
    scopes_.clear();
    scopes_.emplace_back();
    while (!scopes_.empty()) parse_body_item();
  }

  void declare_registers() {
    std::string_view type = read_directive();
    RegisterKind kind = RegisterKind::k32;
    if (type == ".pred") kind = RegisterKind::kPredicate;
    else if (type_bytes(type) == 8) kind = RegisterKind::k64;
    else if (type_bytes(type) == 16) kind = RegisterKind::k128;
    do {
      std::string name(read_identifier());
      int first = static_cast<int>(entry_->registers.size());
      int count = 1;
      if (accept('<')) {
        count = static_cast<int>(read_integer());
        expect('>');
        scopes_.back().ranges[name] = {first, count};
      } else {
        scopes_.back().registers[name] = first;
      }
      entry_->registers.insert(entry_->registers.end(), count, kind);
    } while (accept(','));
    expect(';');
  }

  int find_register(std::string_view name) const {
    size_t digits = name.size();
    while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
    std::string whole(name), prefix(name.substr(0, digits));
    int index = digits < name.size() ? std::atoi(whole.c_str() + digits) : -1;
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (auto found = scope->registers.find(whole); found != scope->registers.end()) return found->second;
      if (index >= 0) {
        auto range = scope->ranges.find(prefix);
        if (range != scope->ranges.end() && index < range->second.second) return range->second.first + index;
      }
    }
    return -1;
  }

  void close_scope() {
    Scope scope = std::move(scopes_.back());
    scopes_.pop_back();
    for (auto& [statement, label] : scope.branches) {
      auto found = scope.labels.find(label);
      if (found != scope.labels.end()) {
        entry_->statements[statement].operands[0].value = found->second;
      } else if (!scopes_.empty()) {
        scopes_.back().branches.emplace_back(statement, label);
      } else {
        throw Fault(format("PTX line %u: no label '%s'", entry_->statements[statement].line, std::string(label).c_str()));
      }
    }
  }

  void parse_body_item() {
    skip_space();
    if (at_ >= end_) fail("unexpected end of the text");
    if (accept('{')) {
      scopes_.emplace_back();
    } else if (accept('}')) {
      close_scope();
    } else if (accept(';')) {
      // an empty statement
    } else if (*at_ == '.') {
      std::string_view directive = read_directive();
      if (directive == ".reg") declare_registers();
      else if (directive == ".shared" || directive == ".local" || directive == ".const" || directive == ".global")
        (directive == ".shared" || directive == ".local" ? entry_->variables : module_.variables)
            .push_back(parse_variable(directive.substr(1)));
      else if (directive == ".loc" || directive == ".file") skip_line();
      else if (directive == ".pragma") skip_past(';');
      else fail("unknown directive " + std::string(directive));
    } else {
      parse_statement();
    }
  }

  void parse_statement() {
    const char* start = at_;
    Statement statement;
    statement.line = line_;
    if (accept('@')) {
      statement.guard_negated = accept('!');
      std::string_view name = read_identifier();
      statement.guard = find_register(name);
      if (statement.guard < 0) fail("unknown predicate " + std::string(name));
      skip_space();
    }
    const char* word = at_;
    read_identifier();
    if (statement.guard < 0) {
      std::string_view label(word, at_ - word);
      if (next_is(':') && at_[1] != ':') {
        ++at_;
        scopes_.back().labels[label] = static_cast<uint32_t>(entry_->statements.size());
        return;
      }
      at_ = word + label.size();
    }
    while (at_ < end_ && (is_identifier(*at_) || *at_ == '.' || (*at_ == ':' && at_[1] == ':'))) at_ += *at_ == ':' ? 2 : 1;
    statement.opcode = std::string_view(word, at_ - word);
    split(statement);
    uint32_t index = static_cast<uint32_t>(entry_->statements.size());
    if (!next_is(';')) {
      do statement.operands.push_back(parse_operand()); while (accept(','));
    }
    expect(';');
    statement.text = std::string_view(start, at_ - start);
    for (Parsed& operand : statement.operands) {
      if (operand.kind == Parsed::kSymbol && statement.parts[0] == "bra") {
        operand.kind = Parsed::kLabel;
        scopes_.back().branches.emplace_back(index, operand.name);
      }
    }
    entry_->statements.push_back(std::move(statement));
  }

  static void split(Statement& statement) {
    std::string_view rest = statement.opcode;
    while (!rest.empty()) {
      size_t dot = rest.find('.');
      statement.parts.push_back(rest.substr(0, dot));
      rest = dot == std::string_view::npos ? std::string_view() : rest.substr(dot + 1);
    }
  }

  Parsed parse_operand() {
    skip_space();
    Parsed result;
    if (accept('!')) {
      result = parse_operand();
      result.negated = true;
      return result;
    }
    if (accept('{')) {
      result.kind = Parsed::kVector;
      if (!accept('}')) {
        do result.elements.push_back(parse_operand()); while (accept(','));
        expect('}');
      }
      return result;
    }
    if (accept('[')) {
      result.kind = Parsed::kAddress;
      Parsed base = parse_operand();
      result.value = base.kind == Parsed::kSymbol ? base.value : 0;
      if (base.kind == Parsed::kSymbol) base.value = 0;
      result.elements.push_back(std::move(base));
      while (next_is('+') || next_is('-')) result.value += read_integer();
      while (accept(',')) result.elements.push_back(parse_operand());
      expect(']');
      return result;
    }
    if (accept('(')) {  // a parenthesised constant
      result = parse_operand();
      expect(')');
      return result;
    }
    if (*at_ == '-' || *at_ == '+' || std::isdigit(static_cast<unsigned char>(*at_))) return read_number();
    const char* start = at_;
    std::string_view name = read_identifier();
    if (name == "_") {
      result.kind = Parsed::kSink;
    } else if (int id = find_register(name); id >= 0) {
      result.kind = Parsed::kRegister;
      result.value = id;
    } else if (name[0] == '%') {
      while (at_ < end_ && (*at_ == '.' || *at_ == ':') && is_identifier_start(at_[1])) ++at_, read_while(is_identifier);
      result.kind = Parsed::kSpecial;
      name = std::string_view(start, at_ - start);
    } else {
      result.kind = Parsed::kSymbol;
      if (next_is('+')) result.value = read_integer();
    }
    result.name = name;
    if (accept('|')) {
      Parsed pair;
      pair.kind = Parsed::kPair;
      pair.elements.push_back(std::move(result));
      pair.elements.push_back(parse_operand());
      return pair;
    }
    return result;
  }

  const char* begin_;
  const char* at_;
  const char* end_;
  uint32_t line_ = 1;
  ParsedModule module_;
  ParsedEntry* entry_ = nullptr;
  std::vector<Scope> scopes_;
};

}  // namespace

ParsedModule parse_ptx(const std::string& source) { return Parser(source).parse(); }

}  // namespace emulator
