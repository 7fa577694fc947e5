#include "mlxtape/formats/json.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "formats/support.h"

namespace mlxtape::formats {
namespace {

std::string nested(int depth) {
  return std::string(static_cast<std::size_t>(depth), '[') +
         std::string(static_cast<std::size_t>(depth), ']');
}

// ---- differences from another reader, on documents that neither wrote ----

struct Documents {
  std::mt19937 random{7};
  int below(int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); }

  std::string space() {
    const char* spaces[] = {"", "", " ", "\n", "\t", "\r\n  "};
    return spaces[below(6)];
  }
  std::string text() {
    const char* parts[] = {"a",           "key",        "\\n",     "\\\"",           "\\\\",
                           "\\/",         "\\u0041",    "\\u00e9", "\\ud83d\\uDe00", "\u00e9",
                           "\u6c34",      "\U0001F600", " ",       "\\u0000",        "\x7f",
                           "\\b\\f\\r\\t"};
    std::string out = "\"";
    for (int n = below(5); n > 0; --n) out += parts[below(16)];
    return out + "\"";
  }
  std::string number() {
    const char* numbers[] = {"0",
                             "-0",
                             "1",
                             "-17",
                             "9223372036854775807",
                             "-9223372036854775808",
                             "1.5",
                             "-0.0",
                             "1e3",
                             "2E-7",
                             "123456789012345678901",
                             "0.1",
                             "1.7976931348623157e308",
                             "5e-324",
                             "3.141592653589793238462643",
                             "10.25e+2"};
    return numbers[below(16)];
  }
  std::string value(int depth) {
    switch (below(depth > 0 ? 7 : 5)) {
      case 0: return "null";
      case 1: return below(2) == 0 ? "true" : "false";
      case 2:
      case 3: return number();
      case 4: return text();
      case 5: {
        std::string out = "[" + space();
        for (int i = 0, n = below(4); i < n; ++i)
          out += (i > 0 ? "," : "") + space() + value(depth - 1) + space();
        return out + "]";
      }
      default: {
        std::string out = "{" + space();
        for (int i = 0, n = below(4); i < n; ++i) {
          std::string key = text();
          key.insert(1, std::to_string(i));  // each once
          out += (i > 0 ? "," : "") + space() + key + space() + ":" + space() + value(depth - 1) +
                 space();
        }
        return out + "}";
      }
    }
  }
};

Json ours_of(const nlohmann::ordered_json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_float()) return value.get<double>();
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{1} << 63U)
    return static_cast<double>(value.get<std::uint64_t>());
  if (value.is_number()) return value.get<std::int64_t>();
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array()) {
    Json::Array array;
    for (const auto& element : value) array.push_back(ours_of(element));
    return array;
  }
  if (value.is_null()) return nullptr;
  Json::Object object;
  for (const auto& [key, element] : value.items()) object.emplace_back(key, ours_of(element));
  return object;
}

TEST(Json, ReadsAndWritesWhatAnotherReaderReads) {
  Documents documents;
  for (int i = 0; i < 2000; ++i) {
    const std::string text = documents.space() + documents.value(4) + documents.space();
    const Json value = Json::parse(text, "document");
    ASSERT_EQ(value, ours_of(nlohmann::ordered_json::parse(text))) << text;
    for (const int indent : {-1, 0, 3}) {
      ASSERT_EQ(Json::parse(value.dump(indent), "dump"), value) << value.dump(indent);
      ASSERT_EQ(ours_of(nlohmann::ordered_json::parse(value.dump(indent))), value);
    }
    JsonReader reader(text, "document");
    reader.skip();
    reader.end();
    EXPECT_EQ(reader.position(), text.size());
  }
}

// One byte changed, one left out, or the end cut off: both say yes, or both no.
TEST(Json, RefusesWhatAnotherReaderRefuses) {
  Documents documents;
  int refused = 0;
  for (int i = 0; i < 4000; ++i) {
    std::string text = documents.value(3);
    const auto at = static_cast<std::size_t>(documents.below(static_cast<int>(text.size())));
    const std::string bytes = "\"{}[],:0.-+eE1\\u \n\x01\x80\xed\xa0tf";
    switch (documents.below(3)) {
      case 0:
        text[at] = bytes[static_cast<std::size_t>(documents.below(static_cast<int>(bytes.size())))];
        break;
      case 1: text.erase(at, 1); break;
      default: text.resize(at);
    }
    bool twice = false;
    std::vector<std::vector<std::string>> open;
    const auto watch = [&](int, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
      if (event == nlohmann::json::parse_event_t::object_start) open.emplace_back();
      if (event == nlohmann::json::parse_event_t::object_end) open.pop_back();
      if (event == nlohmann::json::parse_event_t::key) {
        const auto key = parsed.get<std::string>();
        twice |= std::count(open.back().begin(), open.back().end(), key) > 0;
        open.back().push_back(key);
      }
      return true;
    };
    bool theirs = true;
    try {
      const auto value = nlohmann::json::parse(text, watch);
    } catch (const nlohmann::json::exception&) {
      theirs = false;
    }
    const std::string ours = message_of([&] { Json::parse(text, "document"); });
    if (theirs && !twice && ours.find("range of double") != std::string::npos)
      continue;  // 5e-32400
    EXPECT_EQ(ours == "no error", theirs && !twice) << text << "\n" << ours;
    refused += theirs ? 0 : 1;
  }
  EXPECT_GT(refused, 1000);
}

// ---- what is refused, and how it is said ----

TEST(Json, RefusesMalformedText) {
  const struct {
    std::string text;
    const char* message;
  } table[] = {
      {"", "f.json: byte 0: must be a value, got the end of the text"},
      {" \n", "f.json: byte 2: must be a value, got the end of the text"},
      {"\xEF\xBB\xBF{}",
       "f.json: byte 0: must be a value, got a byte order mark: save it as UTF-8 "
       "without one"},
      {"\xFF\xFE{",
       "f.json: byte 0: must be a value, got a byte order mark of UTF-16: save it as UTF-8"},
      {"[1,\xEF\xBB\xBF\x32]",
       "f.json: byte 3: must be a value, got a byte order mark: save it as UTF-8 without one"},
      {"nul", "f.json: byte 0: must be null, got 'nul'"},
      {"nope 3", "f.json: byte 0: must be null, got 'nope'"},
      {"tru", "f.json: byte 0: must be true or false, got 'tru'"},
      {"True", "f.json: byte 0: must be a value, got 'True'"},
      {"NaN", "f.json: byte 0: must be a value, got 'NaN'"},
      {std::string(50, 'y'), "f.json: byte 0: must be a value, got 'yyyyyyyyyyyyyyyyyyyy'"},
      {"1 2", "f.json: byte 2: must be the end of the text, got '2'"},
      {"truefalse", "f.json: byte 4: must be the end of the text, got 'false'"},
      {std::string("1\0", 2), "f.json: byte 1: must be the end of the text, got byte 0x00"},
      {"01", "f.json: byte 1: must be a number without leading zeros, got '1'"},
      {"-", "f.json: byte 1: must be a digit, got the end of the text"},
      {"+1", "f.json: byte 0: must be a value, got '+'"},
      {"1.", "f.json: byte 2: must be a digit, got the end of the text"},
      {".5", "f.json: byte 0: must be a value, got '.'"},
      {"1e+", "f.json: byte 3: must be a digit, got the end of the text"},
      {" 1e999", "f.json: byte 1: must be in the range of double, got 1e999"},
      {"1e-999", "f.json: byte 0: must be in the range of double, got 1e-999"},
      {"[1,]", "f.json: byte 3: must be a value, got ']'"},
      {"[,1]", "f.json: byte 1: must be a value, got ','"},
      {"[1 2]", "f.json: byte 3: must be ',' or ']', got '2'"},
      {"[1", "f.json: byte 2: must be ',' or ']', got the end of the text"},
      {"[1}", "f.json: byte 2: must be ',' or ']', got '}'"},
      {"{\"a\":1,}", "f.json: byte 7: must be a key, got '}'"},
      {"{a:1}", "f.json: byte 1: must be a key, got 'a'"},
      {"{\"a\" 1}", "f.json: byte 5: must be ':', got '1'"},
      {"{\"a\":}", "f.json: byte 5: must be a value, got '}'"},
      {"{\"a\":1", "f.json: byte 6: must be ',' or '}', got the end of the text"},
      {"{\"a\":1,\"\\u0061\":2}", "f.json: byte 16: each key must come once, got \"a\" twice"},
      {"\"a", "f.json: byte 2: must be '\"' at the end of the string, got the end of the text"},
      {"\"\n\"", "f.json: byte 1: must be escaped, as every control character, got byte 0x0a"},
      {"\"\\x\"", "f.json: byte 2: must be an escape, got 'x'"},
      {"\"\\", "f.json: byte 2: must be an escape, got the end of the text"},
      {"\"\\u12g4\"", "f.json: byte 5: must be a hexadecimal digit, got 'g'"},
      {"\"\\u12", "f.json: byte 5: must be a hexadecimal digit, got the end of the text"},
      {"\"\\ud800\"", "f.json: byte 1: must be a pair of surrogates, got a lone one"},
      {"\"\\ud800\\u0041\"", "f.json: byte 1: must be a pair of surrogates, got a lone one"},
      {"\"x\\udc00\"", "f.json: byte 2: must be a pair of surrogates, got a lone one"},
      {"\"\x80\"", "f.json: byte 1: must be UTF-8, got byte 0x80"},
      {"\"\xC1\xBF\"", "f.json: byte 1: must be UTF-8, got byte 0xc1"},
      {"\"\xE0\x9F\xBF\"", "f.json: byte 1: must be UTF-8, got byte 0xe0"},
      {"\"\xED\xA0\x80\"", "f.json: byte 1: must be UTF-8, got byte 0xed"},
      {"\"\xF0\x8F\xBF\xBF\"", "f.json: byte 1: must be UTF-8, got byte 0xf0"},
      {"\"\xF4\x90\x80\x80\"", "f.json: byte 1: must be UTF-8, got byte 0xf4"},
      {"\"\xF5\x80\x80\x80\"", "f.json: byte 1: must be UTF-8, got byte 0xf5"},
      {"\"\xE6\xB0\"", "f.json: byte 1: must be UTF-8, got byte 0xe6"},
      {"\"\xE6\xB0", "f.json: byte 1: must be UTF-8, got byte 0xe6"},
      {nested(kJsonDepth + 1), "f.json: byte 128: must be at most 128 levels deep"},
  };
  for (const auto& row : table) {
    EXPECT_EQ(message_of([&] { Json::parse(row.text, "f.json"); }), row.message) << row.text;
  }
}

// What lies behind the text belongs to somebody else.
TEST(Json, DoesNotReadBeyondTheText) {
  const std::string text = "\"\u6c34\"";
  for (const std::size_t size : {2, 3}) {
    EXPECT_EQ(message_of([&] { Json::parse(std::string_view(text).substr(0, size), "f.json"); }),
              "f.json: byte 1: must be UTF-8, got byte 0xe6");
  }
  EXPECT_EQ(message_of([] { Json::parse(std::string_view("true").substr(0, 3), "f.json"); }),
            "f.json: byte 0: must be true or false, got 'tru'");
  EXPECT_EQ(Json::parse(std::string_view("123").substr(0, 2), "f.json").integer(), 12);
}

TEST(Json, GoesAsDeepAsItSays) {
  const std::string text = nested(kJsonDepth);
  EXPECT_EQ(Json::parse(text, "deep").dump(), text);
  std::string wide = "[0";
  for (int i = 0; i < 2 * kJsonDepth; ++i) wide += ",[]";
  EXPECT_EQ(Json::parse(wide + "]", "wide").array().size(), 2U * kJsonDepth + 1);
  const std::string million(1000000, '[');
  EXPECT_NE(message_of([&] { JsonReader(million, "deep").skip(); }), "no error");
}

TEST(Json, DecodesStrings) {
  EXPECT_EQ(Json::parse(R"("a\u00e9\u6c34\ud83d\ude00\/\"")", "s").string(),
            "a\u00e9\u6c34\U0001F600/\"");
  EXPECT_EQ(Json::parse("\"\\u0000\"", "s").string(), std::string(1, '\0'));
  EXPECT_EQ(Json::parse("\"\\ud7ff\\ue000\\udbff\\udfff\"", "s").string(),
            "\uD7FF\uE000\U0010FFFF");
  const std::string edges = "\u007f\u0080\u07ff\u0800\uffff";
  EXPECT_EQ(Json::parse("\"" + edges + "\"", "s").string(), edges);
  EXPECT_EQ(Json::parse(R"("\u007f\u0080\u07ff\u0800\uffff")", "s").string(), edges);
}

TEST(Json, TellsIntegersFromNumbers) {
  EXPECT_EQ(Json::parse("9223372036854775807", "n").integer(),
            std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(Json::parse("-9223372036854775808", "n").integer(),
            std::numeric_limits<std::int64_t>::min());
  EXPECT_FALSE(Json::parse("9223372036854775808", "n").is_integer());
  EXPECT_EQ(Json::parse("9223372036854775808", "n").number(), 0x1p63);
  EXPECT_FALSE(Json::parse("1.0", "n").is_integer());
  EXPECT_EQ(Json::parse("1e3", "n").number(), 1000);
  EXPECT_EQ(Json::parse("-7", "n").number(), -7);
  EXPECT_TRUE(std::signbit(Json::parse("-0.0", "n").number()));
  for (const char* text : {"1.0", "1e3", "9223372036854775808"}) {
    EXPECT_EQ(message_of([&] { JsonReader(text, "n").integer(); }),
              std::string("n: byte 0: must be an integer of 64 bits, got ") + text);
  }
}

// ---- the reader by itself ----

TEST(JsonReader, WalksInOrder) {
  const std::string text =
      R"( {"a": [1, -2.5, true], "b": {"c": null, "c": "x"}, "d": [], "e": [[0], {}]} )";
  JsonReader reader(text, "walk");
  std::string key;
  reader.begin_object();
  ASSERT_TRUE(reader.next_key(key));
  EXPECT_EQ(key, "a");
  EXPECT_EQ(reader.peek(), JsonReader::Kind::kArray);
  reader.begin_array();
  ASSERT_TRUE(reader.next_element());
  EXPECT_EQ(reader.integer(), 1);
  ASSERT_TRUE(reader.next_element());
  EXPECT_EQ(reader.number(), -2.5);
  ASSERT_TRUE(reader.next_element());
  EXPECT_TRUE(reader.boolean());
  EXPECT_FALSE(reader.next_element());
  ASSERT_TRUE(reader.next_key(key));
  reader.begin_object();
  ASSERT_TRUE(reader.next_key(key));
  reader.null();
  ASSERT_TRUE(reader.next_key(key));  // the same key again: the caller's to judge
  EXPECT_EQ(key, "c");
  EXPECT_EQ(reader.string(), "x");
  EXPECT_FALSE(reader.next_key(key));
  ASSERT_TRUE(reader.next_key(key));
  reader.begin_array();
  EXPECT_FALSE(reader.next_element());
  ASSERT_TRUE(reader.next_key(key));
  EXPECT_EQ(key, "e");
  reader.skip();
  EXPECT_FALSE(reader.next_key(key));
  reader.end();
}

TEST(JsonReader, SaysWhatMustBeThere) {
  const auto said = [](auto&& read) {
    return message_of([&] {
      JsonReader reader(" ?", "f");
      read(reader);
    });
  };
  EXPECT_EQ(said([](auto& r) { r.begin_object(); }), "f: byte 1: must be an object, got '?'");
  EXPECT_EQ(said([](auto& r) { r.begin_array(); }), "f: byte 1: must be an array, got '?'");
  EXPECT_EQ(said([](auto& r) { r.string(); }), "f: byte 1: must be a string, got '?'");
  EXPECT_EQ(said([](auto& r) { r.integer(); }), "f: byte 1: must be a number, got '?'");
  EXPECT_EQ(said([](auto& r) { r.number(); }), "f: byte 1: must be a number, got '?'");
  EXPECT_EQ(said([](auto& r) { r.boolean(); }), "f: byte 1: must be true or false, got '?'");
  EXPECT_EQ(said([](auto& r) { r.null(); }), "f: byte 1: must be null, got '?'");
  EXPECT_EQ(said([](auto& r) { r.skip(); }), "f: byte 1: must be a value, got '?'");
  EXPECT_EQ(message_of([] { JsonReader("[1e999]", "f").skip(); }),
            "f: byte 1: must be in the range of double, got 1e999");
  EXPECT_EQ(said([](auto& r) { r.end(); }), "f: byte 1: must be the end of the text, got '?'");
  EXPECT_EQ(said([](auto& r) { r.fail("so"); }), "f: byte 0: so");
}

// ---- the tree ----

TEST(Json, SaysWhatItIs) {
  const Json values[] = {nullptr, true, 3, 2.5, "text", Json::Array{}, Json::Object{}};
  const char* kinds[] = {"null",     "a bool",   "an integer", "a number",
                         "a string", "an array", "an object"};
  for (std::size_t i = 0; i < 7; ++i) {
    const Json& value = values[i];
    const bool is[] = {value.is_null(),   value.is_bool(),  value.is_integer(), value.is_number(),
                       value.is_string(), value.is_array(), value.is_object()};
    for (std::size_t k = 0; k < 7; ++k)
      EXPECT_EQ(is[k], k == i || (k == 3 && i == 2)) << i << " " << k;
    const std::string asked[] = {"",
                                 message_of([&] { static_cast<void>(value.boolean()); }),
                                 message_of([&] { static_cast<void>(value.integer()); }),
                                 message_of([&] { static_cast<void>(value.number()); }),
                                 message_of([&] { static_cast<void>(value.string()); }),
                                 message_of([&] { static_cast<void>(value.array()); }),
                                 message_of([&] { static_cast<void>(value.object()); })};
    for (std::size_t k = 1; k < 7; ++k) {
      const std::string error = std::string("json: must be ") + kinds[k] + ", got " + kinds[i];
      EXPECT_EQ(asked[k], is[k] ? "no error" : error);
    }
  }
}

TEST(Json, FindsSetsAndErases) {
  Json value = Json::Object{{"b", 1}, {"a", 2}};
  value.set("c", "new");
  value.set("b", Json::Array{1, 2.5, nullptr});
  EXPECT_EQ(value.dump(), R"({"b": [1, 2.5, null], "a": 2, "c": "new"})");
  EXPECT_EQ(value.find("a")->integer(), 2);
  EXPECT_EQ(value.find("d"), nullptr);
  EXPECT_EQ(value.find("b")->find("a"), nullptr);
  value.erase("b");
  value.erase("d");
  EXPECT_EQ(value.dump(-1, true), R"({"a": 2, "c": "new"})");
  EXPECT_EQ(message_of([] { Json(3).set("a", 1); }), "json: must be an object, got an integer");
  EXPECT_EQ(message_of([] { Json(3).erase("a"); }), "json: must be an object, got an integer");
}

// The texts are what Python's json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) gives.
TEST(Json, IsLaidOutAsPythonDoes) {
  const Json value =
      Json::Object{{"b", Json::Array{1, Json::Array{}, Json::Object{{"z", true}, {"a", nullptr}}}},
                   {"\u00e9", Json::Object{}},
                   {"B", "\u6c34\n\x01\x7f/\"\\"}};
  EXPECT_EQ(value.dump(2, true),
            "{\n  \"B\": \"\u6c34\\n\\u0001\x7f/\\\"\\\\\",\n  \"b\": [\n    1,\n    [],\n    {\n"
            "      \"a\": null,\n      \"z\": true\n    }\n  ],\n  \"\u00e9\": {}\n}");
  EXPECT_EQ(value.find("b")->dump(0), "[\n1,\n[],\n{\n\"z\": true,\n\"a\": null\n}\n]");
  const std::pair<double, const char*> numbers[] = {
      {0, "0.0"},
      {-0.0, "-0.0"},
      {1, "1.0"},
      {1e-6, "1e-06"},
      {1e-4, "0.0001"},
      {1e7, "10000000.0"},
      {1e15, "1000000000000000.0"},
      {1e16, "1e+16"},
      {0.1, "0.1"},
      {-2.5e-5, "-2.5e-05"},
      {1.7976931348623157e308, "1.7976931348623157e+308"},
      {5e-324, "5e-324"},
      {123456789.125, "123456789.125"},
      {9999999999999998, "9999999999999998.0"}};
  for (const auto& [number, text] : numbers) EXPECT_EQ(Json(number).dump(), text);
}

TEST(Json, NumbersAreReadBackBitByBit) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 20000; ++i) {
    const auto value = std::bit_cast<double>(random());
    if (!std::isfinite(value)) continue;
    EXPECT_EQ(std::bit_cast<std::uint64_t>(Json::parse(Json(value).dump(), "n").number()),
              std::bit_cast<std::uint64_t>(value));
    const auto integer = static_cast<std::int64_t>(random()) >> (i % 60);
    EXPECT_EQ(Json::parse(Json(integer).dump(), "n").integer(), integer);
  }
}

TEST(Json, DoesNotWriteWhatCannotBeRead) {
  for (const double value : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    EXPECT_NE(message_of([&] { static_cast<void>(Json(value).dump()); }, Errc::kArgument)
                  .find("must be finite"),
              std::string::npos);
  }
  EXPECT_EQ(message_of([] { static_cast<void>(Json("a\xff").dump()); }, Errc::kArgument),
            "json: text must be UTF-8, got byte 0xff");
}

}  // namespace
}  // namespace mlxtape::formats
