#include "suggest.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>

namespace mlxtape::cli {

namespace {

// What users of mlx-lm, llama.cpp, ollama and Hugging Face type: the first of `here` that is known, or else advice.
struct Foreign {
  std::vector<std::string> words;
  std::vector<std::string> here;
  std::string advice;
};

const std::vector<Foreign>& foreign() {
  static const std::vector<Foreign> all = {
      {{"run", "infer", "complete"}, {}, "Did you mean generate or chat?"},
      {{"talk", "interactive"}, {"chat"}, ""},
      {{"finetune", "fine-tune", "sft", "tune"}, {"lora"}, ""},
      {{"pretrain"}, {"train"}, ""},
      {{"ppl", "evaluate", "perplexities"}, {"eval"}, ""},
      {{"merge"}, {"fuse"}, ""},
      {{"show", "stat", "model-info"}, {"inspect"}, ""},
      {{"benchmark", "llama-bench"}, {"bench"}, ""},
      {{"test", "check"}, {"selftest"}, ""},
      {{"help"}, {}, "Use --help."},
      {{"version"}, {}, "Use --version."},
      {{"pull", "download", "--hf-repo", "--hf", "-hf"},
       {},
       "Models are not downloaded: --model is a directory on this machine."},
      {{"serve", "server"}, {}, "There is no server; generate and chat run a model."},
      {{"--ctx-size", "--n-ctx", "--max-kv-size", "-c"},
       {"--max-context"},
       "It is not needed: the cache grows with the text."},
      {{"--n-gpu-layers", "--gpu-layers", "-ngl"},
       {},
       "--device cuda runs the whole model on the GPU."},
      {{"--file", "-f"}, {"--prompt-file"}, ""},
      {{"--system", "-sys"}, {"--system-prompt"}, ""},
      {{"--lora", "--adapter", "--adapters"}, {"--adapter-path"}, ""},
      {{"--lora-rank", "-r"}, {"--rank"}, ""},
      {{"--lr"}, {"--learning-rate"}, ""},
      {{"--epochs", "--num-epochs", "--steps", "--max-steps", "--num-iters"}, {"--iters"}, ""},
      {{"--dataset", "--data-dir", "--train-data"}, {"--data", "--data-path"}, ""},
      {{"--path", "--model-path", "--hf-path"}, {"--model"}, ""},
      {{"--output", "--out", "--output-dir", "--save", "-o"},
       {"--mlx-path", "--save-path", "--out", "--adapter-path"},
       ""},
      {{"--bits"}, {"--q-bits"}, ""},
      {{"--group-size"}, {"--q-group-size"}, ""},
      {{"--upload-repo", "--export-gguf"}, {}, "It is not supported."},
  };
  return all;
}

bool has(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// How many letters must be put in, taken out, changed or swapped with their neighbour.
std::size_t distance(const std::string& a, const std::string& b) {
  std::array<std::vector<std::size_t>, 3>
      rows;  // of a's beginnings: two before, one before, this one
  for (auto& row : rows) row.resize(b.size() + 1);
  std::iota(rows[2].begin(), rows[2].end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::rotate(rows.begin(), rows.begin() + 1, rows.end());
    auto& [before_last, last, row] = rows;
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t other = a[i - 1] == b[j - 1] ? 0 : 1;
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + other});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
  }
  return rows[2].back();
}

std::string bare(const std::string& word) {
  const std::size_t first = word.find_first_not_of('-');
  return first == std::string::npos ? "" : word.substr(first);
}

// The one that is most like the word; empty: none is.
std::string nearest(const std::string& word, const std::vector<std::string>& known) {
  const std::string wanted = bare(word);
  std::string best;
  std::size_t least = std::min<std::size_t>(3, 1 + wanted.size() / 4) + 1;
  for (const std::string& name : known) {
    const std::size_t d = distance(wanted, bare(name));
    if (d >= least || d >= bare(name).size()) continue;
    least = d;
    best = name;
  }
  if (!best.empty() || wanted.size() < 3) return best;
  // The beginning of exactly one.
  for (const std::string& name : known) {
    if (!bare(name).starts_with(wanted)) continue;
    if (!best.empty()) return "";
    best = name;
  }
  return best;
}

}  // namespace

std::string suggestion(const std::string& typed, const Known& known) {
  const bool is_flag = typed.starts_with("-");
  const std::string word = typed.substr(0, is_flag ? typed.find('=') : std::string::npos);
  const std::vector<std::string>& list = is_flag ? known.flags : known.commands;
  if (has(list, word)) return "Put it after its command.";
  for (const Foreign& each : foreign()) {
    if (!has(each.words, word)) continue;
    const auto found = std::find_if(each.here.begin(), each.here.end(),
                                    [&](const std::string& name) { return has(list, name); });
    if (found != each.here.end()) return "Did you mean " + *found + "?";
    // Advice on commands is about those of the program, not about a command's own.
    if (!each.advice.empty() && (is_flag || has(list, "generate"))) return each.advice;
  }
  const std::string like = nearest(word, list);
  return like.empty() ? "" : "Did you mean " + like + "?";
}

}  // namespace mlxtape::cli
