#include "cli/suggest.h"

#include <gtest/gtest.h>

namespace mlxtape::test {
namespace {

using cli::Known;
using cli::suggestion;

const Known kTop{{"--device", "--threads", "--json", "--help"},
                 {"generate", "chat", "train", "lora", "eval", "quantize", "inspect", "bench"}};
const Known kGenerate{{"--model", "--prompt", "--prompt-file", "--max-tokens", "--temp", "--top-p",
                       "--top-k", "--min-p", "--seed", "--stop", "--adapter-path"},
                      {}};
const Known kQuantize{{"--model", "--mlx-path", "--q-bits", "--q-group-size", "--force"}, {}};

TEST(CliSuggestion, NearWords) {
  EXPECT_EQ(suggestion("gnerate", kTop), "Did you mean generate?");
  EXPECT_EQ(suggestion("generat", kTop), "Did you mean generate?");
  EXPECT_EQ(suggestion("Generate", kTop), "Did you mean generate?");
  EXPECT_EQ(suggestion("quantise", kTop), "Did you mean quantize?");
  EXPECT_EQ(suggestion("insp", kTop), "Did you mean inspect?");  // its beginning
  EXPECT_EQ(suggestion("--tmep", kGenerate), "Did you mean --temp?");
  EXPECT_EQ(suggestion("--top_k", kGenerate), "Did you mean --top-k?");
  EXPECT_EQ(suggestion("--maxtokens=3", kGenerate), "Did you mean --max-tokens?");
  EXPECT_EQ(suggestion("-temp", kGenerate), "Did you mean --temp?");
}

TEST(CliSuggestion, NothingThatIsNotLikeIt) {
  for (const char* word :
       {"frobnicate", "x", "", "--", "-", "--frobnicate", "--x", "-q", "=", "my-model"}) {
    EXPECT_EQ(suggestion(word, kTop), "") << word;
    EXPECT_EQ(suggestion(word, kGenerate), "") << word;
  }
  EXPECT_EQ(suggestion("--prom", Known{{"--prompt", "--prompt-file"}, {}}),
            "Did you mean --prompt?");
  EXPECT_EQ(suggestion("--abc", Known{{"--abcdefgh", "--abcdefgi"}, {}}), "");  // either
  EXPECT_EQ(suggestion("--abc", Known{}), "");
}

TEST(CliSuggestion, WordsOfOtherPrograms) {
  EXPECT_EQ(suggestion("run", kTop), "Did you mean generate or chat?");
  EXPECT_EQ(suggestion("finetune", kTop), "Did you mean lora?");
  EXPECT_EQ(suggestion("--lora", kGenerate), "Did you mean --adapter-path?");
  EXPECT_EQ(suggestion("--ctx-size", kGenerate),
            "It is not needed: the cache grows with the text.");
  EXPECT_EQ(suggestion("--ctx-size", Known{{"--max-context"}, {}}), "Did you mean --max-context?");
  EXPECT_EQ(suggestion("--output", kQuantize), "Did you mean --mlx-path?");
  EXPECT_EQ(suggestion("-o", kQuantize), "Did you mean --mlx-path?");
  // Commands of a command are no commands of the program.
  EXPECT_EQ(suggestion("run", Known{{}, {"ops", "step"}}), "");
}

TEST(CliSuggestion, RightWordsInTheWrongPlace) {
  EXPECT_EQ(suggestion("--temp", kGenerate), "Put it after its command.");
}

}  // namespace
}  // namespace mlxtape::test
