// Recursive descent over the tokens of a template. The order of the functions below is the order in which operators
// bind, loosest first; a test (`is`) and a filter bind tighter than any other operator.
#include <algorithm>
#include <charconv>

#include "formats/real.h"
#include "formats/template_syntax.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats::jinja {
namespace {

using Kind = Token::Kind;
using Op = Expr::Op;
constexpr int kMaxDepth =
    100;  // a block counts once, a bracket or sign twice, each a dozen calls deep
constexpr int kMaxOperands = 300;  // of one chain: as deep as its tree

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  Body all() {
    Body body = statements({});
    if (peek().kind != Kind::kEnd)
      fail("'" + shown(tokens_[at_ + 1].text) + "' ends nothing that was begun");
    return body;
  }

 private:
  // ---- tokens ----

  const Token& peek() const { return tokens_[at_]; }
  const Token& take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool is_op(std::string_view op) const {
    return peek().kind == Kind::kOperator && peek().text == op;
  }
  bool is_name(std::string_view name) const {
    return peek().kind == Kind::kName && peek().text == name;
  }
  bool accept_op(std::string_view op) { return is_op(op) && (take(), true); }
  bool accept_name(std::string_view name) { return is_name(name) && (take(), true); }
  [[noreturn]] void fail(const std::string& what) const { throw Syntax(peek().line, what); }

  std::string here() const {
    switch (peek().kind) {
      case Kind::kPrintEnd: return "}}";
      case Kind::kBlockEnd: return "%}";
      case Kind::kEnd: return "the end of the template";
      default: return "'" + shown(peek().text) + "'";
    }
  }
  void expect_op(std::string_view op) {
    if (!accept_op(op)) fail("'" + std::string(op) + "' was expected, got " + here());
  }
  void expect_name(std::string_view name) {
    if (!accept_name(name)) fail("'" + std::string(name) + "' was expected, got " + here());
  }
  std::string name() {
    if (peek().kind != Kind::kName) fail("a name was expected, got " + here());
    return take().text;
  }
  void expect_end(Kind kind) {
    if (peek().kind != kind) fail("the end of the tag was expected, got " + here());
    take();
  }

  // Counts how deep the parser is in itself.
  struct Depth {
    Parser& parser;
    explicit Depth(Parser& p) : parser(p) {
      if (++p.depth_ > kMaxDepth)
        p.fail("brackets and blocks must be at most " + std::to_string(kMaxDepth) + " deep");
    }
    ~Depth() { --parser.depth_; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;
  };

  Expr node(Op op) const { return {op, peek().line}; }
  static ExprPtr made(Expr e) { return std::make_unique<const Expr>(std::move(e)); }
  ExprPtr made(Op op, ExprPtr a, ExprPtr b = nullptr) const {
    Expr e = node(op);
    e.args.push_back(std::move(a));
    if (b) e.args.push_back(std::move(b));
    return made(std::move(e));
  }
  void count(int& operands) const {
    if (++operands > kMaxOperands)
      fail("an expression must be at most " + std::to_string(kMaxOperands) + " operators long");
  }

  // ---- expressions ----

  ExprPtr expression() {
    const Depth depth(*this);
    ExprPtr e = either();
    int operands = 0;
    while (is_name("if")) {
      count(operands);
      Expr c = node(Op::kIf);
      take();
      c.args.push_back(std::move(e));
      c.args.push_back(either());
      c.args.push_back(accept_name("else") ? expression() : nullptr);
      e = made(std::move(c));
    }
    return e;
  }

  ExprPtr either() {
    ExprPtr e = both();
    for (int n = 0; accept_name("or"); count(n)) e = made(Op::kOr, std::move(e), both());
    return e;
  }
  ExprPtr both() {
    ExprPtr e = negation();
    for (int n = 0; accept_name("and"); count(n)) e = made(Op::kAnd, std::move(e), negation());
    return e;
  }
  ExprPtr negation() {
    if (!is_name("not")) return comparison();
    const Depth depth(*this);
    take();
    return made(Op::kNot, negation());
  }

  ExprPtr comparison() {
    ExprPtr first = sum();
    Expr e = node(Op::kCompare);
    for (int n = 0;; count(n)) {
      static constexpr std::string_view kOps[] = {"==", "!=", "<", "<=", ">", ">="};
      if (peek().kind == Kind::kOperator &&
          std::find(std::begin(kOps), std::end(kOps), peek().text) != std::end(kOps)) {
        e.names.push_back(take().text);
      } else if (accept_name("in")) {
        e.names.emplace_back("in");
      } else if (is_name("not") && tokens_[at_ + 1].kind == Kind::kName &&
                 tokens_[at_ + 1].text == "in") {
        take(), take();
        e.names.emplace_back("not in");
      } else {
        break;
      }
      if (e.args.empty()) e.args.push_back(std::move(first));
      e.args.push_back(sum());
    }
    return e.args.empty() ? std::move(first) : made(std::move(e));
  }

  template <class Next>
  ExprPtr binary(std::initializer_list<std::string_view> ops, Next next) {
    ExprPtr e = next();
    for (int n = 0; peek().kind == Kind::kOperator &&
                    std::find(ops.begin(), ops.end(), peek().text) != ops.end();
         count(n)) {
      Expr b = node(Op::kBinary);
      b.name = take().text;
      b.args.push_back(std::move(e));
      b.args.push_back(next());
      e = made(std::move(b));
    }
    return e;
  }
  ExprPtr sum() {
    return binary({"+", "-"}, [this] { return joined(); });
  }
  ExprPtr joined() {
    ExprPtr first = product();
    if (!is_op("~")) return first;
    Expr e = node(Op::kConcat);
    e.args.push_back(std::move(first));
    while (accept_op("~")) e.args.push_back(product());
    return made(std::move(e));
  }
  ExprPtr product() {
    return binary({"*", "/", "//", "%"}, [this] {
      ExprPtr e = unary(true);
      if (is_op("**")) fail("the operator '**' is not supported");
      return e;
    });
  }

  ExprPtr unary(bool with_filters) {
    const Depth depth(*this);
    ExprPtr e;
    if (is_op("-") || is_op("+")) {
      const Op op = take().text == "-" ? Op::kNegate : Op::kPlus;
      e = made(op, unary(false));
    } else {
      e = primary();
    }
    e = postfix(std::move(e));
    return with_filters ? filters(std::move(e)) : std::move(e);
  }

  ExprPtr postfix(ExprPtr e) {
    for (int n = 0;; count(n)) {
      if (accept_op(".")) {
        Expr a = node(Op::kAttr);
        if (peek().kind == Kind::kInt) {
          e = made(Op::kItem, std::move(e), primary());
          continue;
        }
        a.name = name();
        a.args.push_back(std::move(e));
        e = made(std::move(a));
      } else if (accept_op("[")) {
        e = subscript(std::move(e));
      } else if (is_op("(")) {
        e = call(std::move(e));
      } else {
        return e;
      }
    }
  }

  ExprPtr subscript(ExprPtr of) {
    Expr e = node(Op::kSlice);
    e.args.push_back(std::move(of));
    const auto part = [&]() -> ExprPtr {
      return is_op(":") || is_op("]") ? nullptr : expression();
    };
    e.args.push_back(part());
    if (is_op(":")) {
      for (int i = 0; i < 2; ++i) e.args.push_back(accept_op(":") ? part() : nullptr);
    } else if (e.args[1] == nullptr) {
      fail("an index was expected, got " + here());
    } else {
      e.op = Op::kItem;
    }
    expect_op("]");
    return made(std::move(e));
  }

  ExprPtr call(ExprPtr callee) {
    Expr e = node(Op::kCall);
    e.args.push_back(std::move(callee));
    arguments(e);
    return made(std::move(e));
  }

  void arguments(Expr& e) {
    expect_op("(");
    while (!accept_op(")")) {
      if (is_op("*") || is_op("**"))
        fail("arguments from a list or dict (" + peek().text + ") are not supported");
      if (peek().kind == Kind::kName && tokens_[at_ + 1].kind == Kind::kOperator &&
          tokens_[at_ + 1].text == "=") {
        std::string key = name();
        take();
        e.named.emplace_back(std::move(key), expression());
      } else if (!e.named.empty()) {
        fail("an argument without a name may not follow one with a name");
      } else {
        e.args.push_back(expression());
      }
      if (!is_op(")")) expect_op(",");
    }
  }

  ExprPtr filters(ExprPtr e) {
    for (int n = 0;; count(n)) {
      if (accept_op("|")) {
        Expr f = node(Op::kFilter);
        f.name = name();
        f.args.push_back(std::move(e));
        if (is_op("(")) arguments(f);
        e = made(std::move(f));
      } else if (accept_name("is")) {
        e = test(std::move(e));
      } else if (is_op("(")) {
        e = call(std::move(e));
      } else {
        return e;
      }
    }
  }

  ExprPtr test(ExprPtr e) {
    const bool negated = accept_name("not");
    Expr t = node(Op::kTest);
    t.name = name();
    t.args.push_back(std::move(e));
    static constexpr std::string_view kNoOperand[] = {"else", "or", "and", "if", "in", "not", "is"};
    if (is_op("(")) {
      arguments(t);
    } else if ((peek().kind == Kind::kName &&
                std::find(std::begin(kNoOperand), std::end(kNoOperand), peek().text) ==
                    std::end(kNoOperand)) ||
               peek().kind == Kind::kString || peek().kind == Kind::kInt ||
               peek().kind == Kind::kFloat || is_op("[") || is_op("{")) {
      t.args.push_back(postfix(primary()));
    }
    ExprPtr out = made(std::move(t));
    return negated ? made(Op::kNot, std::move(out)) : std::move(out);
  }

  ExprPtr primary() {
    Expr e = node(Op::kConst);
    const Token token = peek();
    switch (token.kind) {
      case Kind::kString: {
        std::string all;
        while (peek().kind == Kind::kString) all += take().text;
        e.value = Value(std::move(all));
        return made(std::move(e));
      }
      case Kind::kInt: {
        std::int64_t i = 0;
        if (std::from_chars(token.text.data(), token.text.data() + token.text.size(), i).ec !=
            std::errc())
          fail("an integer must fit 64 bits, got " + shown(token.text));
        take();
        e.value = i;
        return made(std::move(e));
      }
      case Kind::kFloat: {
        double d = 0;
        if (!to_real(token.text, d))
          fail("a number must be in the range of double, got " + token.text);
        take();
        e.value = d;
        return made(std::move(e));
      }
      case Kind::kName:
        take();
        if (token.text == "true" || token.text == "True") {
          e.value = true;
        } else if (token.text == "false" || token.text == "False") {
          e.value = false;
        } else if (token.text == "none" || token.text == "None") {
          e.value = nullptr;
        } else {
          e.op = Op::kName;
          e.name = token.text;
        }
        return made(std::move(e));
      default: break;
    }
    if (accept_op("(")) return parenthesis(std::move(e));
    if (accept_op("[")) {
      e.op = Op::kList;
      items(e, "]", [&] { e.args.push_back(expression()); });
      return made(std::move(e));
    }
    if (accept_op("{")) {
      e.op = Op::kDict;
      items(e, "}", [&] {
        e.args.push_back(expression());
        expect_op(":");
        e.args.push_back(expression());
      });
      return made(std::move(e));
    }
    fail("an expression was expected, got " + here());
  }

  template <class Item>
  void items(Expr& e, std::string_view close, Item item) {
    while (!accept_op(close)) {
      if (!e.args.empty()) expect_op(",");
      if (accept_op(close)) return;
      item();
    }
  }

  ExprPtr parenthesis(Expr e) {
    e.op = Op::kTuple;
    if (accept_op(")")) return made(std::move(e));
    e.args.push_back(expression());
    if (accept_op(")")) return std::move(e.args[0]);
    items(e, ")", [&] { e.args.push_back(expression()); });
    return made(std::move(e));
  }

  // a, b: a tuple without brackets
  ExprPtr tuple() {
    ExprPtr first = expression();
    if (!is_op(",")) return first;
    Expr e = node(Op::kTuple);
    e.args.push_back(std::move(first));
    while (accept_op(",") && peek().kind != Kind::kPrintEnd && peek().kind != Kind::kBlockEnd)
      e.args.push_back(expression());
    return made(std::move(e));
  }

  // ---- statements ----

  // Until a block that begins with one of the names, which is left to the caller.
  Body statements(std::initializer_list<std::string_view> ends) {
    const Depth depth(*this);
    Body body;
    for (;;) {
      const Token& token = peek();
      if (token.kind == Kind::kText) {
        body.push_back({Stmt::Kind::kText, token.line, take().text});
      } else if (token.kind == Kind::kPrintBegin) {
        Stmt s{Stmt::Kind::kPrint, token.line};
        take();
        s.exprs.push_back(tuple());
        expect_end(Kind::kPrintEnd);
        body.push_back(std::move(s));
      } else if (token.kind == Kind::kBlockBegin) {
        const Token& word = tokens_[at_ + 1];
        if (word.kind != Kind::kName) throw Syntax(word.line, "a block must begin with a name");
        if (std::find(ends.begin(), ends.end(), word.text) != ends.end()) return body;
        if (ends.size() == 0 && (word.text.starts_with("end") || word.text.starts_with("el")))
          return body;
        take();
        body.push_back(statement());
      } else {
        if (ends.size() != 0) fail("'" + std::string(*(ends.end() - 1)) + "' is missing");
        return body;
      }
    }
  }
  void end_of(std::string_view name) {
    expect_end(Kind::kBlockBegin);
    expect_name(name);
    expect_end(Kind::kBlockEnd);
  }

  Stmt statement() {
    const int line = peek().line;
    const std::string word = take().text;
    if (word == "if") return if_statement(line);
    if (word == "for") return for_statement(line);
    if (word == "set") return set_statement(line);
    if (word == "macro") return macro_statement(line);
    if (word == "generation") {
      Stmt s{Stmt::Kind::kGeneration, line};
      expect_end(Kind::kBlockEnd);
      s.bodies.push_back(statements({"endgeneration"}));
      end_of("endgeneration");
      return s;
    }
    if (word == "break" || word == "continue") {
      if (loops_ == 0) throw Syntax(line, "'" + word + "' must be inside of a loop");
      expect_end(Kind::kBlockEnd);
      return {word == "break" ? Stmt::Kind::kBreak : Stmt::Kind::kContinue, line};
    }
    throw Syntax(line, "the statement '" + shown(word) + "' is not supported here");
  }

  Stmt if_statement(int line) {
    Stmt s{Stmt::Kind::kIf, line};
    do {
      s.exprs.push_back(tuple());
      expect_end(Kind::kBlockEnd);
      s.bodies.push_back(statements({"elif", "else", "endif"}));
      expect_end(Kind::kBlockBegin);
    } while (accept_name("elif"));
    if (accept_name("else")) {
      expect_end(Kind::kBlockEnd);
      s.bodies.push_back(statements({"endif"}));
      expect_end(Kind::kBlockBegin);
    }
    expect_name("endif");
    expect_end(Kind::kBlockEnd);
    return s;
  }

  std::vector<std::string> target_names() {
    const bool bracket = accept_op("(");
    std::vector<std::string> names{name()};
    while (accept_op(",")) {
      if (peek().kind == Kind::kName && !is_name("in")) names.push_back(name());
    }
    if (bracket) expect_op(")");
    return names;
  }

  Stmt for_statement(int line) {
    Stmt s{Stmt::Kind::kFor, line};
    s.targets = target_names();
    expect_name("in");
    // Without an inline if: that word begins the filter of the loop.
    s.exprs.push_back(either());
    if (accept_name("if")) s.exprs.push_back(expression());
    if (is_name("recursive")) fail("a recursive loop is not supported");
    expect_end(Kind::kBlockEnd);
    ++loops_;
    s.bodies.push_back(statements({"else", "endfor"}));
    --loops_;
    expect_end(Kind::kBlockBegin);
    if (accept_name("else")) {
      expect_end(Kind::kBlockEnd);
      s.bodies.push_back(statements({"endfor"}));
      expect_end(Kind::kBlockBegin);
    }
    expect_name("endfor");
    expect_end(Kind::kBlockEnd);
    return s;
  }

  Stmt set_statement(int line) {
    Stmt s{Stmt::Kind::kSet, line};
    s.targets = target_names();
    if (s.targets.size() == 1 && accept_op(".")) {
      s.kind = Stmt::Kind::kSetMember;
      s.name = name();
    }
    if (accept_op("=")) {
      s.exprs.push_back(tuple());
      expect_end(Kind::kBlockEnd);
      return s;
    }
    if (s.kind != Stmt::Kind::kSet || s.targets.size() != 1)
      fail("'=' was expected, got " + here());
    s.kind = Stmt::Kind::kSetBlock;
    s.name = " body";  // no name of a template has a space in it
    Expr text = node(Op::kName);
    text.name = s.name;
    s.exprs.push_back(filters(made(std::move(text))));
    expect_end(Kind::kBlockEnd);
    s.bodies.push_back(statements({"endset"}));
    end_of("endset");
    return s;
  }

  Stmt macro_statement(int line) {
    if (loops_ != 0 || in_macro_)
      throw Syntax(line, "a macro inside of a loop or another macro is not supported");
    Stmt s{Stmt::Kind::kMacro, line};
    s.name = name();
    expect_op("(");
    while (!accept_op(")")) {
      s.targets.push_back(name());
      if (accept_op("=")) {
        s.exprs.push_back(expression());
      } else if (!s.exprs.empty()) {
        fail("a parameter without a default may not follow one with a default");
      }
      if (!is_op(")")) expect_op(",");
    }
    expect_end(Kind::kBlockEnd);
    in_macro_ = true;
    s.bodies.push_back(statements({"endmacro"}));
    in_macro_ = false;
    end_of("endmacro");
    return s;
  }

  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int depth_ = 0, loops_ = 0;
  bool in_macro_ = false;
};

}  // namespace

Body parse(std::string_view text) { return Parser(tokenize(text)).all(); }

}  // namespace mlxtape::formats::jinja
