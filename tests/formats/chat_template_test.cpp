// Against jinja2's own results (make_chat_golden.py): whole conversations, and a table of expressions. Where the golden
// file holds null, jinja2 raised an error, and so must we.
#include "mlxtape/formats/chat_template.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "mlxtape/base/error.h"
#include "mlxtape/base/files.h"

namespace mlxtape::formats {
namespace {

const Json& golden() {
  static const Json json =
      Json::parse(read_whole(MLXTAPE_GOLDEN "/chat.json", "test"), "chat.json");
  return json;
}

std::optional<std::string> rendered(const std::string& text, const Json& messages,
                                    const ChatOptions& options) {
  try {
    return ChatTemplate(text, "t").render(messages, options);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::kIo) << e.what();  // whatever is wrong, the template is a model's
    EXPECT_TRUE(std::string(e.what()).starts_with("t: line ")) << e.what();
    return std::nullopt;
  }
}

std::optional<std::string> wanted(const Json& want) {
  return want.is_null() ? std::nullopt : std::optional(want.string());
}

std::string message_of(const std::string& text, const ChatOptions& options = {},
                       Errc code = Errc::kIo) {
  try {
    ChatTemplate(text, "t").render(Json(Json::Array{}), options);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    return e.what();
  }
  return "no error";
}

TEST(ChatTemplate, ConversationsAsJinja2) {
  int cases = 0;
  for (const Json& row : golden().find("cases")->array()) {
    const std::string& name = row.array()[0].string();
    const std::string& conversation = row.array()[1].string();
    ChatOptions options;
    options.bos_token = "<s>";
    options.eos_token = "</s>";
    options.variables =
        golden().find("options")->array()[static_cast<std::size_t>(row.array()[2].integer())];
    if (const Json* tools = options.variables.find("tools")) options.tools = *tools;
    if (const Json* add = options.variables.find("add_generation_prompt"))
      options.add_generation_prompt = add->boolean();
    options.variables.erase("tools");
    options.variables.erase("add_generation_prompt");
    EXPECT_EQ(rendered(golden().find("templates")->find(name)->string(),
                       *golden().find("conversations")->find(conversation), options),
              wanted(row.array()[3]))
        << name << " of " << conversation << ", options " << options.variables.dump();
    ++cases;
  }
  EXPECT_GT(cases, 60);
}

TEST(ChatTemplate, ExpressionsAsJinja2) {
  ChatOptions options;
  options.variables = *golden().find("variables");
  int refused = 0;
  for (const Json& row : golden().find("expressions")->array()) {
    const std::string& text = row.array()[0].string();
    EXPECT_EQ(rendered(text, Json(Json::Array{}), options), wanted(row.array()[1])) << text;
    refused += row.array()[1].is_null() ? 1 : 0;
  }
  EXPECT_GT(refused, 20);
}

TEST(ChatTemplate, VariablesReachTheTemplate) {
  const ChatTemplate t(
      "{{ messages[0].role }}{{ tools }}{{ bos_token }}{{ eos_token }}{{ add_generation_prompt "
      "}}{{ x }}",
      "t");
  ChatOptions options{true, Json(Json::Array{Json("f")}), "B", "E",
                      Json(Json::Object{{"x", Json(1)}})};
  EXPECT_EQ(t.render(Json::parse(R"([{"role": "r"}])", "m"), options), "r['f']BETrue1");
  options.variables.set("bos_token", "C");  // what is said last counts
  EXPECT_EQ(t.render(Json::parse(R"([{"role": "r"}])", "m"), options), "r['f']CETrue1");
}

TEST(ChatTemplate, TheClockCanBeSet) {
  ChatOptions options;
  options.now = 86400 * 365;  // noon is the same day wherever this runs
  *options.now += 43200;
  EXPECT_EQ(ChatTemplate("{{ strftime_now('%Y-%m') }}", "t").render(Json(Json::Array{}), options),
            "1971-01");
}

TEST(ChatTemplate, SaysWhatIsWrongAndWhere) {
  struct Row {
    const char *text, *message;
  };
  const Row table[] = {
      {"\n\n{% include 'x' %}", "t: line 3: the statement 'include' is not supported here"},
      {"{% raw %}", "'raw' is not supported"},
      {"a\n{{ 1 | rot13 }}", "t: line 2: the filter 'rot13' is not supported"},
      {"{{ 1 is prime }}", "the test 'prime' is not supported"},
      {"{{ 'a'.zfill(3) }}", "the method 'zfill' of str is not supported"},
      {"{{ {}.update({}) }}", "the method 'update' of dict is not supported"},
      {"{{ [].append(1) }}", "the method 'append' of list is not supported"},
      {"{{ 2 ** 3 }}", "'**' is not supported"},
      {"{{ range(*[1]) }}", "arguments from a list or dict (*) are not supported"},
      {"{% for a in [] recursive %}{% endfor %}", "recursive loop is not supported"},
      {"{% for a in [] %}{% macro f() %}{% endmacro %}{% endfor %}", "a macro inside of a loop"},
      {"{% macro f() %}\n{% if 1 %}{% endmacro %}", "t: line 2: the statement 'endmacro'"},
      {"{% if 1 %}\n", "'endif' is missing"},
      {"{% endfor %}", "'endfor' ends nothing"},
      {"{% 1 %}", "a block must begin with a name"},
      {"{% continue %}", "'continue' must be inside of a loop"},
      {"{{ 99999999999999999999 }}", "must fit 64 bits"},
      {"{{ 9223372036854775807 + 1 }}", "must fit 64 bits"},
      {"{{ 1e999 }}", "must be in the range of double"},
      {"{{ 1 // 0 }}", "division by zero"},
      {"{{ 1 + 'a' }}", "'+' is not defined between int and str"},
      {"{{ x.y }}", "'x' is undefined"},
      {"{{ x(1) }}", "'x' is undefined"},
      {"{{ 1(2) }}", "a value of type int cannot be called"},
      {"{% for x in 3 %}{% endfor %}", "a value of type int cannot be iterated over"},
      {"{% set a, b = [1] %}", "2 values are needed, one for each name, got 1"},
      {"{% set a.b = 1 %}", "'a' is none"},
      {"{{ 'a'|upper(1) }}", "upper: must be given at most 0 arguments, got 1"},
      {"{{ 'a'|trim(foo=1) }}", "trim: has no parameter 'foo'"},
      {"{{ 'a'|trim('a', chars='b') }}", "the parameter 'chars' is given twice"},
      {"{% macro f(a) %}{% endmacro %}{{ f(b=1) }}", "macro 'f': has no parameter 'b'"},
      {"{% macro f(a=1, b) %}{% endmacro %}", "may not follow one with a default"},
      {"{{ f(a=1, 2) }}", "may not follow one with a name"},
      {"{{ namespace }}", "a function cannot be printed"},
      {"{{ [namespace()] }}", "must hold values only, got a Namespace"},
      {"{{ {1: 2} }}", "a key of a dict must be a text"},
      {"{{ [1][::0] }}", "must not be 0"},
      {"{{ range(1, 5, 0) }}", "must not be 0"},
      {"{{ 'abc'.split('') }}", "must not be empty"},
      {"{{ 'abc'.replace('', 'x') }}", "must not be empty"},
      {"{{ raise_exception('the card says no') }}", "t: line 1: the card says no"},
      {"{{ '\\u12' }}", "4 hexadecimal digits"},
      {"{{ ) }}", "')' closes nothing"},
      {"{{ @ }}", "'@' is no part of an expression"},
      {"{{ 1", "not closed by }}"},
      {"\xff", "valid UTF-8"},
  };
  for (const Row& row : table)
    EXPECT_NE(message_of(row.text).find(row.message), std::string::npos)
        << row.text << "\n  " << message_of(row.text);
  EXPECT_THROW(ChatTemplate("", "t").render(Json()), Error);
  ChatOptions options;
  options.variables = Json(1);
  EXPECT_NE(message_of("", options, Errc::kArgument).find("variables must be an object"),
            std::string::npos);
}

// A template's own words, and its names, are shown and not obeyed; and only so much of them.
TEST(ChatTemplate, WhatIsQuotedIsEscapedAndShort) {
  EXPECT_EQ(message_of("{{ raise_exception('\x1b[31mred\\n' ~ '\\u009b' ~ '\\a') }}"),
            "t: line 1: \\x1b[31mred\\n\\u009b\\x07");
  const std::string name(100'000, 'x');
  for (const std::string& text : std::vector<std::string>{
           "{{ raise_exception('a' * 100000) }}", "{{ " + name + ".a }}", "{{ 1|" + name + " }}",
           "{{ 1 is " + name + " }}", "{% " + name + " %}", "{% if a " + name + " %}{% endif %}",
           "{{ strftime_now('" + name + "') }}", "{% set " + name + ".a = 1 %}",
           "{% macro f() %}{% endmacro %}{{ f(" + name + "=1) }}", "{{ 1|int(" + name + "=1) }}"}) {
    EXPECT_LT(message_of(text).size(), 1100U) << message_of(text).substr(0, 80);
    EXPECT_GT(message_of(text).size(), 200U) << message_of(text);
  }
}

// What each of these makes is too large. Their steps would last: that a text or list is too long must be known before.
TEST(ChatTemplate, LengthsAreKnownBeforeMemoryIsTaken) {
  ChatOptions options;
  options.max_steps = std::int64_t{1} << 60;
  const std::pair<const char*, const char*> table[] = {
      {"{{ 'a' * 99999999 }}", "bytes long"},
      {"{{ ('a' * 60000000) + ('a' * 60000000) }}", "bytes long"},
      {"{{ ('a' * 60000000) ~ ('a' * 60000000) }}", "bytes long"},
      {"{{ ('a' * 60000000).replace('a', 'b' * 1000) }}", "bytes long"},
      {"{{ ('a' * 2000000)|replace('a', 'b' * 1000) }}", "bytes long"},
      {"{{ ('a' * 60000000).split('a') }}", "1048576 parts"},
      {"{{ ('a' * 2000000).rsplit('a') }}", "1048576 parts"},
      {"{{ ('a ' * 2000000).split() }}", "1048576 parts"},
      {"{{ ('\\n' * 2000000).splitlines() }}", "1048576 parts"},
      {"{{ ('a' * 2000000)|list }}", "cannot be taken apart"},
      {"{{ ('b' * 1000).join(('a ' * 100000).split()) }}", "bytes long"},
      {"{{ ('a ' * 100000).split()|join('b' * 1000) }}", "bytes long"},
      {"{{ 'a\\nb'|indent(1000000000) }}", "bytes long"},
      {"{{ 'a'|indent(1000000000, first=true) }}", "bytes long"},
      {"{{ ('\\n' * 1000000)|indent('b' * 1000, blank=true) }}", "bytes long"},
      {"{{ [1]|tojson(indent=1000000000) }}", "bytes long"},
      {"{{ [1]|tojson(indent=9223372036854775807) }}", "bytes long"},
      {"{{ ('\\x01' * 12000000)|tojson }}", "bytes long"},
      {"{{ ['\\x01' * 20000000] }}", "bytes long"},
      {"{{ range(99999999999) }}", "at most 100000 elements"},
      {"{% set l = 'a' * 1000000 %}{{ l|list + l|list }}", "elements"},
      {"{{ strftime_now('%999999999d') }}", "less than 4096 bytes"},
      {"{{ strftime_now('a' * 60000000) }}", "less than 4096 bytes"},
  };
  for (const auto& [text, message] : table) {
    EXPECT_NE(message_of(text, options).find(message), std::string::npos)
        << text << "\n  " << message_of(text, options);
  }
  EXPECT_EQ(message_of("{{ 'a'|indent(1000000000) }}"), "no error");  // a first line that is not
  EXPECT_NE(message_of(std::string(kMaxTemplateBytes + 1, 'a')).find("2097152 bytes long"),
            std::string::npos);
}

// Prompts of megabytes are ordinary: each of these would take minutes if a text were copied at each of its pieces.
TEST(ChatTemplate, LongTextsAreBuiltInPlace) {
  std::string content;
  for (int i = 0; i < 100'000; ++i) content += "every sentence\nhas an e ";
  Json messages = Json::Array{Json::Object{{"role", "user"}, {"content", content}}};
  const auto rendered = [&](const std::string& expression) {
    return ChatTemplate("{% set c = messages[0].content %}{{ " + expression + " }}", "t")
        .render(messages);
  };
  const std::string large = rendered("c.replace('e', 'E')");
  EXPECT_EQ(large.size(), content.size());
  EXPECT_EQ(large.substr(0, 24), "EvEry sEntEncE\nhas an E ");
  EXPECT_EQ(rendered("c|replace('e', 'E')"), large);
  EXPECT_EQ(rendered("'E'.join(c.split('e'))"), large);
  EXPECT_EQ(rendered("c.split('e')|join('E')"), large);
  EXPECT_EQ(rendered("c|indent(1)").size(), content.size() + 100'000);
  EXPECT_EQ(rendered("c.splitlines()|length"), "100001");
  // From the end, past a place where only the first letter is right.
  EXPECT_EQ(rendered("'abcabd'.rfind('abc') ~ 'abcabd'.rsplit('bc', 1)"), "0['a', 'abd']");
}

// Whatever walks through a text or a list pays for it. Thirty walks through a million bytes, or twenty thousand elements, are
// more than these steps; thirty turns of a loop are not.
TEST(ChatTemplate, EveryWalkIsPaidFor) {
  ChatOptions options;
  options.max_steps = 500'000;
  const auto message = [&](const std::string& body) {
    return message_of(
        "{% set s = 'a' * 1000000 %}{% set l = ('a b ' * 10000).split() %}"
        "{% set d = {'a': s, 'b': l} %}{% for i in range(30) %}" +
            body + "{% endfor %}",
        options);
  };
  EXPECT_EQ(message("{% set x = s.startswith('a') and l|length > 3 and d.a %}"), "no error");
  for (const char* body : {
           "{% set x = ('a' * 999 ~ 'b') in s %}",
           "{% set x = s.find('aaaaaaaaaaaaaaaaab') %}",
           "{% set x = s.rfind('baaaaaaaaaaaaaaaaa') %}",
           "{% set x = s.count('a') %}",
           "{% set x = s.replace('a', 'b') %}",
           "{% set x = s|replace('b', 'a') %}",
           "{% set x = s.split('b') %}",
           "{% set x = s.strip('b') %}",
           "{% set x = 'b'.strip(s) %}",
           "{% set x = s|trim %}",
           "{% set x = s.startswith(s) %}",
           "{% set x = s.removeprefix('a') %}",
           "{% set x = s.upper() %}",
           "{% set x = s|lower %}",
           "{% set x = s|title %}",
           "{% set x = s.title() %}",
           "{% set x = s|capitalize %}",
           "{% set x = s is upper %}",
           "{% set x = s.isdigit() or s.isspace() %}{% set x = s.splitlines() %}",
           "{% set x = s|length %}",
           "{% set x = s|reverse %}",
           "{% set x = s[::-1] %}",
           "{% set x = s[999990:] %}",
           "{{ s }}",
           "{% set x = s[999999] %}",
           "{% set x = s|int %}",
           "{% set x = s|float %}",
           "{% set x = s|list %}",
           "{% set x = s|tojson %}",
           "{% set x = [s] ~ '' %}",
           "{% set x = s ~ s %}",
           "{% set x = s + s %}",
           "{% set x = s * 2 %}",
           "{% set x = s == s[1:] ~ 'a' %}",
           "{% set x = s|indent %}",
           "{% set x %}{{ s }}{% endset %}",
           "{% set x = l|join %}",
           "{% set x = ''.join(l) %}",
           "{% set x = l|sort %}",
           "{% set x = l|unique %}",
           "{% set x = l|max %}",
           "{% set x = l|map('upper')|list %}",
           "{% set x = l|select('eq', 'c')|list %}",
           "{% set x = l|tojson %}",
           "{% set x = l + l %}",
           "{% set x = l[1:] %}",
           "{% set x = l == l[:] %}",
           "{% set x = 'c' in l %}",
           "{% set x = l|reverse %}",
           "{% set x = d.values()|list ~ '' %}",
           "{% set x = d|dictsort ~ '' %}",
           "{% set x = range(99999) %}",
           "{% set x = {}[s] %}",
           "{% set x = l|tojson(separators=(s, s)) %}",
           "{% set x = []|tojson(separators=(s, s)) %}",
       }) {
    EXPECT_EQ(message(body), "t: line 1: the template takes too many steps") << body;
  }
}

// A value that is handed on is not copied: each of these would move terabytes.
TEST(ChatTemplate, LongTextsAreShared) {
  const std::string long_ones =
      "{% set s = 'a' * 20000000 %}{% set u = {}[s] %}{% set l = [s, u] %}{% set d = {'k': u} %}"
      "{% macro f(x) %}{% endmacro %}{% set n = namespace(k=1) %}"
      "{% for i in range(50000) %}";
  for (const char* body : {
           "{% set v = u %}",
           "{% set v = l %}",
           "{% set v = [u, s, u] %}",
           "{% set v = (u, 1)[0] %}",
           "{% set v = d.k %}",
           "{% set v = d['k'] or u %}",
           "{% set v = l[1:] + l %}",
           "{% set v = l|last %}",
           "{% set v = u|default(u) %}",
           "{% set v = f(u) %}",
           "{% set v = f(x=s) %}",
           "{% set v = dict(a=u) %}",
           "{% set n.k = u %}",
           "{% set v = s.upper %}",
           "{% set v = []|select(s)|list %}",
           "{% set v = []|map(s)|list %}",
           "{% set v = u is defined and u == 1 %}",
           "{% for w in l %}{% set v = w %}{% endfor %}",
       }) {
    EXPECT_EQ(message_of(long_ones + body + "{% endfor %}"), "no error") << body;
  }
  EXPECT_NE(message_of("{{ {}['a' * 60000000] + 1 }}").find("' is undefined"), std::string::npos);
  EXPECT_EQ(message_of("{{ 1 + raise }}"), "t: line 1: 'raise' is undefined");
}

// Each would run for ever, fill the memory or overflow the stack.
TEST(ChatTemplate, HostileTemplatesEnd) {
  ChatOptions options;
  options.max_steps = 300'000;
  const auto repeat = [](const std::string& s, int n) {
    std::string out;
    for (int i = 0; i < n; ++i) out += s;
    return out;
  };
  const std::string grow = "{% for a in range(9999) %}";
  const std::pair<std::string, const char*> table[] = {
      {repeat("{% for a in range(99999) %}", 3) + repeat("{% endfor %}", 3), "too many steps"},
      {"{% set n = namespace(s='aaaaaaaa') %}" + grow + "{% set n.s = n.s + n.s %}{% endfor %}",
       ""},
      {"{% set n = namespace(s='aaaaaaaa') %}" + grow + "{% set n.s = n.s ~ n.s %}{% endfor %}",
       ""},
      {"{% set n = namespace(s=[1]) %}" + grow + "{% set n.s = n.s + n.s %}{% endfor %}", ""},
      {"{% set n = namespace(s=[1]) %}" + grow + "{% set n.s = [n.s] %}{% endfor %}", "128 deep"},
      {"{% set n = namespace(s=[1]) %}" + grow + "{% set n.s = [n.s, n.s] %}{% endfor %}",
       "elements"},
      {"{% set n = namespace() %}{% set n.n = n %}", "must hold values only"},
      {"{{ 'a' * 999999999999 }}", "bytes long"},
      {"{{ 'aaaaaaaaaaaaaaaa' * 9999999 }}", "bytes long"},
      {"{% for c in 'a' * 2000000 %}{% endfor %}", "cannot be taken apart"},
      {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deep"},
      {"{{ " + repeat("(", 100000) + "1" + repeat(")", 100000) + " }}", "100 deep"},
      {"{{ " + repeat("not ", 100000) + "1 }}", "100 deep"},
      {"{{ " + repeat("- ", 100000) + "1 }}", "100 deep"},
      {"{{ 1" + repeat(" + 1", 100000) + " }}", "operators long"},
      {"{{ 1" + repeat(" | int", 100000) + " }}", "operators long"},
      {"{{ a" + repeat(".a", 100000) + " }}", "operators long"},
      {repeat("{% if 1 %}", 100000), "100 deep"},
  };
  for (const auto& [text, message] : table) {
    const std::string got = message_of(text, options);
    EXPECT_NE(got, "no error") << text.substr(0, 80);
    EXPECT_NE(got.find(message), std::string::npos) << text.substr(0, 80) << "\n  " << got;
  }
  // As deep and long as is allowed, which sanitizers' larger frames must survive.
  EXPECT_EQ(message_of("{{ " + repeat("[", 45) + repeat("]", 45) + " }}"), "no error");
  EXPECT_EQ(message_of("{{ 1" + repeat(" + 1", 290) + " }}"), "no error");
}

}  // namespace
}  // namespace mlxtape::formats
