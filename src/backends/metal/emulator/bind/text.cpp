// A .metal file as one text without files of ours: what a Mac compiles, and what bind reads. The host's half, and what
// stands under a test for __METAL_VERSION__ in common headers, are cut here; so are comments.
#include "backends/metal/emulator/bind/text.h"

#include <filesystem>
#include <set>

#include "backends/metal/emulator/bind/tokens.h"

namespace mlxtape::metal_bind {
namespace {

namespace fs = std::filesystem;

std::string without_comments(const std::string& text) {
  std::string out;
  for (const Token& token : tokens_of(text)) {
    if (token.kind != Token::Kind::kSpace || token.text[0] != '/') {
      out += token.text;
      continue;
    }
    out += ' ';
    for (const char c : token.text) {
      if (c == '\n') out += c;
    }
  }
  return out;
}

// The words of a directive, "#ifdef X" as {"ifdef", "X"}; none: the line is no directive.
std::vector<std::string> directive_of(const std::string& line) {
  std::vector<std::string> words;
  const std::size_t hash = line.find_first_not_of(" ");
  if (hash == std::string::npos || line[hash] != '#') return words;
  std::string word;
  for (const char c : line.substr(hash + 1) + " ") {
    if (c != ' ') {
      word += c;
    } else if (!word.empty()) {
      words.push_back(word);
      word.clear();
    }
  }
  return words;
}

enum class Condition { kTaken, kCut, kOther };

// What a directive says of __METAL_VERSION__, which is defined.
Condition condition_of(const std::vector<std::string>& words) {
  std::string rest;
  for (std::size_t i = 1; i < words.size(); ++i) rest += words[i];
  const bool plain = words[0] == "if";
  if ((words[0] == "ifdef" && rest == "__METAL_VERSION__") ||
      (plain && (rest == "defined(__METAL_VERSION__)" || rest == "defined__METAL_VERSION__"))) {
    return Condition::kTaken;
  }
  if ((words[0] == "ifndef" && rest == "__METAL_VERSION__") ||
      (plain && (rest == "!defined(__METAL_VERSION__)" || rest == "!defined__METAL_VERSION__"))) {
    return Condition::kCut;
  }
  return Condition::kOther;
}

class Flattener {
 public:
  explicit Flattener(const TextPlaces& places) : places_(places) {}

  void add(const fs::path& path) {
    files_.push_back(path.string());
    seen_.insert(fs::canonical(path).string());
    const std::string shown = fs::relative(path, places_.root).generic_string();
    const std::string text = without_comments(read_file(path.string()));
    out_ += "#line 1 \"" + shown + "\"\n";
    std::vector<Condition> conditions;
    long number = 0;
    std::size_t begin = 0;
    while (begin < text.size()) {
      std::size_t end = text.find('\n', begin);
      if (end == std::string::npos) end = text.size();
      std::string line = text.substr(begin, end - begin);
      begin = end + 1;
      ++number;
      while (!line.empty() && line.back() == ' ') line.pop_back();
      place_ = shown + ":" + std::to_string(number) + ": ";
      add_line(line, path, shown, number, conditions);
    }
    if (!conditions.empty()) throw Error(shown + ": a condition is not closed");
    while (out_.size() > 1 && out_.substr(out_.size() - 2) == "\n\n") out_.pop_back();
  }

  std::string take_text() { return std::move(out_); }
  const std::vector<std::string>& files() const { return files_; }

 private:
  void add_line(const std::string& line, const fs::path& path, const std::string& shown,
                long number, std::vector<Condition>& conditions) {
    const std::vector<std::string> words = directive_of(line);
    const std::string what = words.empty() ? "" : words[0];
    const bool was_cut = is_cut(conditions);
    if (what == "if" || what == "ifdef" || what == "ifndef") {
      conditions.push_back(condition_of(words));
      if (conditions.back() != Condition::kOther) return end_line();
    } else if (what == "else" || what == "elif" || what == "endif") {
      if (conditions.empty()) throw Error(place_ + "#" + what + " without a condition");
      Condition& last = conditions.back();
      const bool ours = last != Condition::kOther;
      if (ours && what == "elif") throw Error(place_ + "#elif of a test for __METAL_VERSION__");
      if (ours && what == "else")
        last = last == Condition::kCut ? Condition::kTaken : Condition::kCut;
      if (what == "endif") conditions.pop_back();
      if (ours) return end_line();
    } else if (!was_cut && what == "include") {
      return include(words, path, shown, number, conditions);
    } else if (what == "pragma" && words.size() > 1 && words[1] == "once") {
      return end_line();
    }
    if (!was_cut) out_ += line;
    end_line();
  }

  static bool is_cut(const std::vector<Condition>& conditions) {
    for (const Condition c : conditions) {
      if (c == Condition::kCut) return true;
    }
    return false;
  }

  void end_line() { out_ += '\n'; }

  void include(const std::vector<std::string>& words, const fs::path& from,
               const std::string& shown, long number, const std::vector<Condition>& conditions) {
    if (words.size() != 2 || words[1].size() < 3)
      throw Error(place_ + "an #include that cannot be read");
    const std::string name = words[1].substr(1, words[1].size() - 2);
    if (words[1][0] == '<') {
      if (name.rfind("metal_", 0) != 0) throw Error(place_ + "Metal has no <" + name + ">");
      out_ += "#include <" + name + ">";
      return end_line();
    }
    for (const Condition c : conditions) {
      if (c == Condition::kOther) throw Error(place_ + "an #include under a condition");
    }
    const fs::path path = find(name, from);
    if (seen_.count(fs::canonical(path).string()) != 0) return end_line();
    add(path);
    out_ += "#line " + std::to_string(number + 1) + " \"" + shown + "\"\n";
  }

  fs::path find(const std::string& name, const fs::path& from) const {
    if (fs::exists(from.parent_path() / name)) return from.parent_path() / name;
    for (const std::string& folder : places_.includes) {
      if (fs::exists(fs::path(folder) / name)) return fs::path(folder) / name;
    }
    throw Error(place_ + "\"" + name + "\" is not found");
  }

  TextPlaces places_;
  std::string out_, place_;
  std::set<std::string> seen_;
  std::vector<std::string> files_;
};

std::string escaped(const std::string& line) {
  std::string out;
  for (const char c : line) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

}  // namespace

FlatText flatten(const std::string& path, const TextPlaces& places) {
  Flattener flattener(places);
  flattener.add(path);
  return {flattener.take_text(), flattener.files()};
}

std::string embedded(const std::string& stem, const std::string& text) {
  std::string out = "// Generated from " + stem +
                    ".metal.\n#include \"backends/metal/library.h\"\n\n" +
                    "namespace mlxtape::metal::texts {\nnamespace {\nconstexpr char kText[] =\n";
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = text.find('\n', begin);
    out += "    \"" + escaped(text.substr(begin, end - begin)) + "\\n\"\n";
    begin = end + 1;
  }
  return out + "    \"\";\n}  // namespace\nextern const Text " + stem + ";\nconst Text " + stem +
         "{\"" + stem + "\", kText, sizeof kText - 1};\n}  // namespace mlxtape::metal::texts\n";
}

}  // namespace mlxtape::metal_bind
