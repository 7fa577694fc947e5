// How the values of a chat template are written: as Python prints them, and as JSON.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include <utf8proc.h>

#include "formats/template_value.h"
#include "formats/utf8.h"

namespace mlxtape::formats::jinja {
namespace {

// The shortest digits that round-trip, written as Python does: an exponent below 1e-4 and from 1e16 on.
std::string float_text(double d) {
  if (std::isnan(d)) return "nan";
  if (std::isinf(d)) return d < 0 ? "-inf" : "inf";
  char text[40];
  const double size = std::abs(d);
  const bool plain = size == 0 || (size >= 1e-4 && size < 1e16);
  const auto end = std::to_chars(text, text + sizeof text, d,
                                 plain ? std::chars_format::fixed : std::chars_format::scientific);
  std::string out(text, end.ptr);
  if (plain && out.find('.') == std::string::npos) out += ".0";
  return out;
}

bool printable(char32_t c) {
  const utf8proc_category_t category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  return c == ' ' || (category < UTF8PROC_CATEGORY_ZS && category != UTF8PROC_CATEGORY_CN);
}

void append_hex(TextBuilder& out, const char* format, unsigned code) {
  char text[16];
  const int length = std::snprintf(text, sizeof text, format, code);
  out.append({text, static_cast<std::size_t>(length)});
}

// Appends a text, but for those of its characters that `escape` appends in another form, where it returns true.
template <class Escape>
void append_escaped(TextBuilder& out, std::string_view s, Escape escape) {
  spend(walked(s.size()));
  std::size_t plain = 0;  // where those begin that are not yet in out
  for (std::size_t at = 0; at < s.size();) {
    const std::size_t begin = at;
    const char32_t c = next_code_point(s, at);
    if (c >= 0x20 && c < 0x7F && c != '"' && c != '\'' && c != '\\') continue;
    TextBuilder form;
    if (!escape(form, c)) continue;
    spend(2);
    out.append(s.substr(plain, begin - plain));
    out.append(form.take());
    plain = at;
  }
  out.append(s.substr(plain));
}

void append_repr(TextBuilder& out, const std::string& s) {
  const char quote =
      s.find('\'') != std::string::npos && s.find('"') == std::string::npos ? '"' : '\'';
  out.append(1, quote);
  append_escaped(out, s, [quote](TextBuilder& form, char32_t c) {
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      form.append(1, '\\'), form.append(1, static_cast<char>(c));
    } else if (c == '\n' || c == '\r' || c == '\t') {
      form.append(c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t");
    } else if (!printable(c)) {
      append_hex(form, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
    } else {
      return false;
    }
    return true;
  });
  out.append(1, quote);
}

void append_json_string(TextBuilder& out, const std::string& s, bool ascii) {
  out.append(1, '"');
  append_escaped(out, s, [ascii](TextBuilder& form, char32_t c) {
    constexpr std::string_view kSpecial = "\"\\\n\r\t\b\f", kLetters = "\"\\nrtbf";
    if (const std::size_t i = c < 0x80 ? kSpecial.find(static_cast<char>(c)) : kSpecial.npos;
        i != kSpecial.npos) {
      form.append(1, '\\'), form.append(1, kLetters[i]);
    } else if (c < 0x20 || (ascii && c > 0x7E && c < 0x10000)) {
      append_hex(form, "\\u%04x", c);
    } else if (ascii && c >= 0x10000) {
      append_hex(form, "\\u%04x", 0xD800U + ((c - 0x10000) >> 10));
      append_hex(form, "\\u%04x", 0xDC00U + ((c - 0x10000) & 0x3FFU));
    } else {
      return false;
    }
    return true;
  });
  out.append(1, '"');
}

struct JsonWriter {
  const JsonStyle& style;
  TextBuilder out{};

  void line(std::size_t depth) {
    if (!style.indent) return;
    check_length(*style.indent);  // a product of two that fit can be held
    out.append(1, '\n');
    out.append(*style.indent * depth, ' ');
  }
  void separator(bool first, std::size_t depth) {
    if (!first) out.append(style.comma);
    line(depth);
  }
  void write_list(const List& items, std::size_t depth) {
    out.append("[");
    bool first = true;
    for (const Value& item : items)
      separator(first, depth + 1), first = false, write(item, depth + 1);
    if (!first) line(depth);
    out.append("]");
  }
  void write_dict(const Dict& dict, std::size_t depth) {
    std::vector<const Dict::value_type*> items;
    for (const auto& item : dict) items.push_back(&item);
    if (style.sorted) {
      std::sort(items.begin(), items.end(), [](const auto* a, const auto* b) {
        spend(1 + copied(std::min(a->first.size(), b->first.size())));
        return a->first < b->first;
      });
    }
    out.append("{");
    bool first = true;
    for (const auto* item : items) {
      separator(first, depth + 1), first = false;
      append_json_string(out, item->first, style.ascii);
      out.append(style.colon);
      write(item->second, depth + 1);
    }
    if (!first) line(depth);
    out.append("}");
  }
  void write(const Value& v, std::size_t depth) {
    spend(1);
    if (v.is_none()) {
      out.append("null");
    } else if (v.is_bool()) {
      out.append(v.truth() ? "true" : "false");
    } else if (v.is_string()) {
      append_json_string(out, v.string(), style.ascii);
    } else if (v.is_float() && !std::isfinite(v.number())) {
      out.append(std::isnan(v.number()) ? "NaN" : v.number() < 0 ? "-Infinity" : "Infinity");
    } else if (v.is_number()) {
      out.append(v.str().string());
    } else if (v.is_list()) {
      write_list(v.list(), depth);
    } else if (v.is_dict()) {
      write_dict(v.dict(), depth);
    } else {
      throw Fault(std::string("tojson: a value of type ") + v.type() + " has no JSON form");
    }
  }
};

}  // namespace

void Value::repr(TextBuilder& out) const {
  spend(1);
  if (is_none()) {
    out.append("None");
  } else if (is_bool()) {
    out.append(truth() ? "True" : "False");
  } else if (is_int()) {
    out.append(std::to_string(integer()));
  } else if (is_float()) {
    out.append(float_text(number()));
  } else if (is_string()) {
    append_repr(out, string());
  } else if (is_list()) {
    out.append(is_tuple() ? "(" : "[");
    const char* comma = "";
    for (const Value& item : list()) out.append(comma), item.repr(out), comma = ", ";
    if (is_tuple() && list().size() == 1) out.append(",");
    out.append(is_tuple() ? ")" : "]");
  } else if (is_dict()) {
    out.append("{");
    const char* comma = "";
    for (const auto& [key, item] : dict()) {
      out.append(comma), append_repr(out, key), out.append(": "), item.repr(out), comma = ", ";
    }
    out.append("}");
  } else if (is_undefined()) {
    out.append("Undefined");
  } else {
    throw Fault(std::string("a ") + type() + " cannot be printed");
  }
}

Value Value::str() const {
  if (is_string()) return *this;
  if (is_undefined()) return "";
  TextBuilder out;
  repr(out);
  return out.take();
}

std::string to_json(const Value& value, const JsonStyle& style) {
  JsonWriter writer{style};
  writer.write(value, 0);
  return writer.out.take();
}

}  // namespace mlxtape::formats::jinja
