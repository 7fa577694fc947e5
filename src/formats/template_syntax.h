// A chat template as a tree: text -> tokens (template_lex.cpp) -> statements (template_parse.cpp).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/template_value.h"

namespace mlxtape::formats::jinja {

struct Token {
  enum class Kind {
    kText,
    kPrintBegin,
    kPrintEnd,
    kBlockBegin,
    kBlockEnd,
    kName,
    kString,
    kInt,
    kFloat,
    kOperator,
    kEnd
  };
  Kind kind;
  std::string text;
  int line;
};

// White space beside tags is already gone, and so are comments. Throws Syntax.
std::vector<Token> tokenize(std::string_view text);

struct Syntax : Fault {
  Syntax(int where, const std::string& what) : Fault(what), line(where) {}
  int line;
};

struct Expr;
using ExprPtr = std::unique_ptr<const Expr>;

struct Expr {
  enum class Op {
    kConst,    // value
    kName,     // name
    kList,     // args
    kTuple,    // args
    kDict,     // args: key, value, key, ...
    kAttr,     // args[0].name
    kItem,     // args[0][args[1]]
    kSlice,    // args[0][args[1]:args[2]:args[3]], each but the first may be null
    kCall,     // args[0](args[1], ..., named)
    kFilter,   // args[0] | name(args[1], ..., named)
    kTest,     // args[0] is name(args[1], ...)
    kNot,      // args[0]
    kNegate,   // args[0]
    kPlus,     // args[0]
    kAnd,      // args[0], args[1]
    kOr,       // args[0], args[1]
    kIf,       // args[0] if args[1] else args[2], which may be null
    kCompare,  // args[0] names[0] args[1] names[1] ...
    kBinary,   // args[0] name args[1]
    kConcat,   // args, joined
  };
  Op op;
  int line;
  std::string name{};
  Value value{};
  std::vector<ExprPtr> args{};
  std::vector<std::pair<std::string, ExprPtr>> named{};
  std::vector<std::string> names{};
};

struct Stmt;
using Body = std::vector<Stmt>;

struct Stmt {
  enum class Kind {
    kText,       // name is the text
    kPrint,      // exprs[0]
    kIf,         // bodies[i] where exprs[i] holds first; one more body: else
    kFor,        // targets in exprs[0] (if exprs[1]): bodies[0], else bodies[1]
    kSet,        // targets = exprs[0]
    kSetMember,  // targets[0].name = exprs[0]
    kSetBlock,  // targets[0] = bodies[0], through the filters of exprs[0], where `name` stands for the text
    kMacro,       // name(targets, whose defaults are the last exprs): bodies[0]
    kGeneration,  // bodies[0], in a scope of its own
    kBreak,
    kContinue,
  };
  Kind kind;
  int line;
  std::string name{};
  std::vector<std::string> targets{};
  std::vector<ExprPtr> exprs{};
  std::vector<Body> bodies{};
};

Body parse(std::string_view text);  // throws Syntax

}  // namespace mlxtape::formats::jinja
