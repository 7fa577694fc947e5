// Real tokenizers against the libraries they were made for: the directories of reference_tokenizers.py, in
// MLXTAPE_PARITY_TOKENIZERS. They are too large to be kept in the tree.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "formats/tokenizer_base64.h"
#include "mlxtape/base/files.h"
#include "mlxtape/formats/tokenizer.h"

namespace mlxtape::formats {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> directories() {
  std::vector<fs::path> out;
  for (const auto& entry : fs::directory_iterator(std::getenv("MLXTAPE_PARITY_TOKENIZERS"))) {
    if (fs::exists(entry.path() / "cases.jsonl")) out.push_back(entry.path());
  }
  std::sort(out.begin(), out.end());
  return out;
}

std::string tokenizer_file(const fs::path& directory) {
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.path().filename() != "cases.jsonl") return entry.path().string();
  }
  return "";
}

// The texts whose ids, and those whose text again, are others than the library's; the first few are shown.
void compare(const fs::path& directory) {
  const Tokenizer t = Tokenizer::from_file(tokenizer_file(directory));
  FileLines lines((directory / "cases.jsonl").string(), "parity");
  std::size_t count = 0, bytes = 0, ids_differ = 0, texts_differ = 0;
  for (std::string line; lines.next(line); ++count) {
    const Json row = Json::parse(line, directory.string());
    const Json& given = row.array()[0];
    std::string text;
    if (given.is_string()) {
      text = given.string();
    } else {
      ASSERT_TRUE(append_base64(text, given.find("base64")->string()));
    }
    bytes += text.size();
    std::vector<TokenId> want;
    for (const Json& id : row.array()[1].array())
      want.push_back(static_cast<TokenId>(id.integer()));
    if (t.encode(text, false) != want && ids_differ++ < 3)
      ADD_FAILURE() << directory << ": ids of " << given.dump();
    const Json& back = row.array()[2];
    if (!back.is_null() && t.decode(want, true) != back.string() && texts_differ++ < 3)
      ADD_FAILURE() << directory << ": text again of " << given.dump();
  }
  EXPECT_GT(count, 1000U);
  EXPECT_EQ(ids_differ, 0U) << directory;
  EXPECT_EQ(texts_differ, 0U) << directory;
  std::printf("%-28s %zu texts, %zu bytes: %zu with other ids, %zu with another text again\n",
              directory.filename().c_str(), count, bytes, ids_differ, texts_differ);
}

TEST(TokenizerParity, IdsAndTexts) {
  if (std::getenv("MLXTAPE_PARITY_TOKENIZERS") == nullptr)
    GTEST_SKIP() << "make parity makes what this compares";
  const std::vector<fs::path> all = directories();
  ASSERT_FALSE(all.empty());
  for (const fs::path& directory : all) compare(directory);
}

}  // namespace
}  // namespace mlxtape::formats
