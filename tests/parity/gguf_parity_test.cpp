// GGUF files that llama.cpp computes with too: ours must give the same log-probabilities (gguf_models.py).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "mlxtape/base/files.h"
#include "mlxtape/formats/gguf_model.h"
#include "mlxtape/models/load.h"
#include "mlxtape/models/quantize.h"
#include "mlxtape/ops/elementwise.h"
#include "support/temp_folder.h"

namespace mlxtape::models {
namespace {

using formats::Json;

// Of the token that follows all of these, by a model whose weights are read in f32.
std::vector<double> logprobs(CommandEncoder& encoder, const Model& model, const Json& tokens) {
  std::vector<std::int32_t> ids;
  for (const Json& id : tokens.array()) ids.push_back(static_cast<std::int32_t>(id.integer()));
  const auto count = static_cast<std::int64_t>(ids.size());
  const Tensor input = encoder.empty({1, count}, DType::kI32);
  encoder.upload(ids.data(), input.bytes(), input);
  Tape tape(encoder);
  const Model wide = cast_model(encoder, model, DType::kF32);
  const Tensor all = logits(tape, wide, hidden(tape, wide, input)).detach();
  encoder.commit_and_wait();
  const auto rows = static_cast<std::size_t>(all.shape().back());
  const float* last = all.host<float>().data() + rows * (ids.size() - 1);
  const double most = *std::max_element(last, last + rows);
  double sum = 0;
  for (std::size_t i = 0; i < rows; ++i) sum += std::exp(last[i] - most);
  std::vector<double> result(rows);
  for (std::size_t i = 0; i < rows; ++i) result[i] = last[i] - most - std::log(sum);
  return result;
}

// The largest difference among tokens that are at all likely.
double distance(const std::vector<double>& ours, const Json::Array& theirs) {
  double result = 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (theirs[i].number() < -12 && ours[i] < -12) continue;
    result = std::max(result, std::abs(ours[i] - theirs[i].number()));
  }
  return result;
}

struct Folders {
  std::filesystem::path from, to;  // to: what we write is kept there; empty: nowhere
};
Folders folders() {
  const char* from = std::getenv("MLXTAPE_PARITY_GGUF");
  const char* to = std::getenv("MLXTAPE_PARITY_GGUF_SAVED");
  return {from == nullptr ? MLXTAPE_GOLDEN_GGUF : from, to == nullptr ? "" : to};
}

TEST(GgufParity, ModelsGiveWhatLlamaCppGives) {
  const Folders at = folders();
  const auto encoder = Device::cpu().make_encoder();
  int cases = 0;
  for (const auto& entry : std::filesystem::directory_iterator(at.from)) {
    if (entry.path().extension() != ".json") continue;
    ++cases;
    const Json want = Json::read_file(entry.path().string(), "parity");
    const std::string name = entry.path().stem().string();
    const Model model = load_model((at.from / (name + ".gguf")).string(), *encoder);
    const std::vector<double> ours = logprobs(*encoder, model, *want.find("tokens"));
    const double apart = distance(ours, want.find("logprobs")->array());
    EXPECT_LE(apart, want.find("tolerance")->number()) << name;
    if (!at.to.empty()) std::printf("%-16s %.6f apart\n", name.c_str(), apart);
    // A model that computes anything gives other tokens other numbers.
    std::vector<double> turned = ours;
    std::rotate(turned.begin(), turned.begin() + 1, turned.end());
    EXPECT_GT(distance(turned, want.find("logprobs")->array()), want.find("tolerance")->number());
  }
  EXPECT_GE(cases, 3);
}

// What is written must be what was read: the same numbers by ours, and for llama.cpp to judge.
TEST(GgufParity, WrittenModelsGiveTheSame) {
  const Folders at = folders();
  const test::TempFolder folder;
  const std::filesystem::path to = at.to.empty() ? folder.path : at.to;
  const auto encoder = Device::cpu().make_encoder();
  for (const auto& entry : std::filesystem::directory_iterator(at.from)) {
    if (entry.path().extension() != ".json") continue;
    const std::string name = entry.path().stem().string(), file = name + ".gguf";
    const Json want = Json::read_file(entry.path().string(), "parity");
    const Model model = load_model((at.from / file).string(), *encoder);
    SaveGgufOptions options;
    options.files_from = (at.from / file).string();
    const auto saved = save_gguf(model, (to / file).string(), options);
    const Model again = load_model((to / file).string(), *encoder);
    const std::vector<double> ours = logprobs(*encoder, again, *want.find("tokens"));
    const double apart = distance(ours, want.find("logprobs")->array());
    EXPECT_LE(apart, want.find("tolerance")->number()) << name;
    if (saved.rounded == 0) {
      const std::vector<double> before = logprobs(*encoder, model, *want.find("tokens"));
      double most = 0;
      for (std::size_t i = 0; i < before.size(); ++i) {
        most = std::max(most, std::abs(before[i] - ours[i]));
      }
      EXPECT_LE(most, 2e-5) << name;  // A_log does not come back bit by bit
    }
    write_whole((to / (name + ".json")).string(), want.dump(), "parity");
  }
}

}  // namespace
}  // namespace mlxtape::models
