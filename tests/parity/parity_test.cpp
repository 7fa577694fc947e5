// Models against what mlx-lm computed with the same directory: every layer, logits, loss, every parameter's
// gradient, greedy tokens. The directories: MLXTAPE_PARITY_MODELS, or the ones kept in the tree (README.md).
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <sstream>

#include "mlxtape/base/files.h"
#include "mlxtape/formats/safetensors.h"
#include "mlxtape/models/load.h"
#include "mlxtape/models/lora.h"
#include "mlxtape/models/quantize.h"
#include "mlxtape/models/state.h"
#include "mlxtape/ops/elementwise.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

namespace fs = std::filesystem;
using formats::Json;
using models::WeightFormat;

struct Case {
  std::string path;
  Backend backend;
};

std::string models_path() {
  const char* given = std::getenv("MLXTAPE_PARITY_MODELS");
  return given != nullptr ? given : MLXTAPE_GOLDEN_MODELS;
}

std::vector<Case> cases() {
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(models_path())) {
    if (fs::exists(entry.path() / "case.json")) paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Case> result;
  for (const Backend backend : built_backends()) {
    for (const std::string& path : paths) result.push_back({path, backend});
  }
  return result;
}

std::string name_of_case(const testing::TestParamInfo<Case>& info) {
  std::string name = fs::path(info.param.path).filename().string();
  std::replace_if(name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
  return name + "_" + name_of(info.param.backend);
}

class Parity : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const std::vector<Device*>& devices = Device::all();
    const auto found = std::find_if(devices.begin(), devices.end(), [](Device* device) {
      return device->backend() == GetParam().backend;
    });
    if (found == devices.end()) {
      GTEST_SKIP() << "no " << name_of(GetParam().backend) << " device here";
    }
    encoder_ = (*found)->make_encoder();
    file_ = std::make_unique<formats::SafetensorsFile>(GetParam().path + "/reference.safetensors");
    const std::string about = GetParam().path + "/case.json";
    case_ = Json::parse(read_whole(about, "parity"), about);
    model_ = models::load_model(GetParam().path, *encoder_);
    const std::string adapters = GetParam().path + "/adapters";
    if (fs::exists(adapters)) lora_ = models::load_adapters(*encoder_, model_, adapters);
  }

  CommandEncoder& encoder() { return *encoder_; }
  const models::Model& model() const { return model_; }
  bool is_adapted() const { return models::has_lora(model_); }
  const models::LoraOptions& lora() const { return lora_; }
  bool has(const std::string& name) const { return file_->has(name); }
  const std::vector<std::string>& reference_names() const { return file_->names(); }
  Tensor reference(const std::string& name) const { return file_->tensor(name); }
  std::vector<std::int32_t> ids(const std::string& name) const {
    const auto values = reference(name).host<std::int32_t>();
    return {values.begin(), values.end()};
  }
  bool is_f32() const { return case_.find("dtype")->string() == "float32"; }
  // Of a tensor, or of its kind, as a part of the largest value.
  double tolerance(const std::string& name) const {
    const Json* all = case_.find("tolerance");
    const Json* value = all->find(name);
    if (value == nullptr) value = all->find(name.substr(0, name.find('.')));
    if (value == nullptr) throw std::logic_error("case.json has no tolerance of " + name);
    return value->number();
  }

  Tensor tokens(std::int64_t from, std::int64_t to) {
    const Tensor all = reference("tokens");
    const Tensor part = Device::cpu().make_encoder()->contiguous(all.slice(1, from, to));
    const Tensor there = encoder_->empty(part.shape(), DType::kI32);
    encoder_->upload(part.data(), part.bytes(), there);
    return there;
  }

  std::vector<float> values(const Tensor& t) {
    const Tensor wide = encoder_->contiguous(ops::cast(*encoder_, t.detach(), DType::kF32));
    std::vector<float> result(static_cast<std::size_t>(wide.size()));
    encoder_->download(wide, result.data(), wide.bytes());
    return result;
  }

  static double largest(std::span<const float> v) {
    double most = 0;
    for (const float x : v) most = std::max(most, std::abs(static_cast<double>(x)));
    return most;
  }
  static double farthest(std::span<const float> a, std::span<const float> b) {
    double most = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      const double d = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
      most = std::isnan(d) ? INFINITY : std::max(most, d);
    }
    return most;
  }

  // In f32 near mlx-lm's result; in bf16 about as near to the result in f32 as mlx-lm's is.
  void expect_close(const std::string& name, const Tensor& got, std::int64_t row = -1) {
    const auto part = [&](const Tensor& t) {
      return (row < 0 ? t : t.select(0, row)).host<float>();
    };
    const Tensor whole = reference(name);
    const auto theirs = part(whole);
    const std::vector<float> ours = values(got);
    ASSERT_EQ(ours.size(), theirs.size()) << name;
    const std::string kind = name == "chunked.logits" ? "logits" : name;
    if (is_f32()) {
      const double most = largest(theirs);
      EXPECT_LE(farthest(ours, theirs), tolerance(kind) * most)
          << name << ": the largest value is " << most;
    } else if (has("exact." + name)) {
      const Tensor exact = reference("exact." + name);
      double allowed = farthest(theirs, part(exact));
      if (name ==
          "loss") {  // one number may be near by luck; it moves no further than the logits do
        const Tensor rough = reference("logits"), fine = reference("exact.logits");
        allowed = farthest(rough.host<float>(), fine.host<float>());
      }
      EXPECT_LE(farthest(ours, part(exact)), tolerance("own_error") * allowed)
          << name << ": mlx-lm is off by " << allowed;
    }
  }

 private:
  std::unique_ptr<CommandEncoder> encoder_;
  std::unique_ptr<formats::SafetensorsFile> file_;
  Json case_;
  models::Model model_;
  models::LoraOptions lora_;
};

TEST_P(Parity, EveryLayer) {
  Tape tape(encoder());
  models::HiddenOptions options;
  options.seen = [&](std::int64_t layer, const Tensor& h) {
    expect_close("hidden." + std::to_string(layer), h);
  };
  const Tensor all = tokens(0, reference("tokens").dim(1));
  expect_close("hidden.embed", nn::embed(tape, model().weights.embedding, all));
  const Tensor h = models::hidden(tape, model(), all, options);
  expect_close("hidden.norm", h);
  expect_close("logits", models::logits(tape, model(), h));
}

TEST_P(Parity, LossAndEveryGradient) {
  const std::int64_t length = reference("tokens").dim(1);
  for (const bool checkpoint : {false, true}) {
    Tape tape(encoder());
    const models::Model watched =
        is_adapted() ? models::watch_lora(tape, model()) : models::watch(tape, model());
    const std::vector<models::Parameter> parameters =
        is_adapted() ? models::lora_parameters(watched) : models::parameters(watched);
    models::HiddenOptions options;
    options.checkpoint = checkpoint;
    const Tensor loss =
        models::loss(tape, watched, tokens(0, length - 1), tokens(1, length), options);
    expect_close("loss", loss);
    if (!is_f32()) continue;
    tape.backward(loss);
    std::size_t checked = 0, floats = 0, given = 0;
    for (const auto& [name, tensor, shape] : parameters) {
      floats += is_float(tensor.dtype()) ? 1 : 0;
      if (!has("grad." + name)) continue;
      EXPECT_EQ(reference("grad." + name).shape(), shape) << name;
      expect_close("grad." + name, tape.grad(tensor));
      ++checked;
    }
    for (const std::string& name : reference_names()) given += name.starts_with("grad.") ? 1 : 0;
    EXPECT_EQ(checked, given) << "gradients of parameters that we do not have";
    if (given > 0) {
      EXPECT_EQ(checked, floats) << "parameters without a reference";
    }
  }
}

// The weights with their adapters in them compute the same, but for their last bits.
TEST_P(Parity, Fused) {
  if (!is_adapted() || !is_f32()) GTEST_SKIP() << "of models with adapters, in f32";
  const models::Model fused = models::fuse_lora(encoder(), model(), {true});
  Tape tape(encoder());
  const Tensor all = tokens(0, reference("tokens").dim(1));
  expect_close("logits", models::logits(tape, fused, models::hidden(tape, fused, all)));
}

TEST_P(Parity, TokensInTwoChunks) {
  const Tensor all = reference("tokens");
  const std::int64_t batch = all.dim(0), length = all.dim(1);
  const auto split = static_cast<std::size_t>(ids("chunked.split")[0]);
  models::State state(model(), batch, length + 5);
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto row = all.host<std::int32_t>().subspan(static_cast<std::size_t>(b * length),
                                                      static_cast<std::size_t>(length));
    models::prefill(encoder(), model(), state, b, row.first(split));
    const Tensor last = models::prefill(encoder(), model(), state, b, row.subspan(split), 7);
    expect_close("chunked.logits", last, b);
  }
}

TEST_P(Parity, GreedyTokens) {
  const std::vector<std::int32_t> prompt = ids("greedy.prompt"), want = ids("greedy.tokens");
  models::State state(model(), 1, static_cast<std::int64_t>(prompt.size() + want.size()));
  const auto best = [&](const Tensor& logits) {
    const std::vector<float> z = values(logits);
    return static_cast<std::int32_t>(std::max_element(z.begin(), z.end()) - z.begin());
  };
  std::vector<std::int32_t> got{best(models::prefill(encoder(), model(), state, 0, prompt))};
  models::Stepper stepper(encoder(), model(), state);
  while (got.size() < want.size()) got.push_back(best(stepper.step({&got.back(), 1})));
  EXPECT_EQ(got, want);
}

// For mlx-lm to read (reread.py): what we save, as it is and quantised by us, with the logits that we compute. Adapters lie
// beside their model, and once more in it.
TEST_P(Parity, SavedForMlx) {
  const char* folder = std::getenv("MLXTAPE_PARITY_SAVED");
  if (folder == nullptr) GTEST_SKIP() << "MLXTAPE_PARITY_SAVED names no folder";
  if (GetParam().backend != Backend::kCpu) GTEST_SKIP() << "saved from the cpu";
  const auto save = [&](const models::Model& saved, const std::string& name) {
    const std::string path = std::string(folder) + "/" + name;
    models::SaveOptions options;
    options.replace = true;
    models::Model plain = saved;
    models::remove_lora(plain);
    models::save_model(plain, path, options);
    if (models::has_lora(saved)) models::save_adapters(saved, path + "/adapters", lora());
    Tape tape(encoder());
    const Tensor all = tokens(0, reference("tokens").dim(1));
    const Tensor z = models::logits(tape, saved, models::hidden(tape, saved, all));
    const std::vector<formats::NamedTensor> ours = {
        {"tokens", all}, {"logits", ops::cast(encoder(), z, DType::kF32)}};
    formats::write_safetensors(path + "/ours.safetensors", ours);
  };
  const std::string name = fs::path(GetParam().path).filename().string();
  save(model(), name);
  if (model().config.quantization.usual.bits == 0) {
    const models::WeightFormat format{4, 32};
    save(models::quantize_model(encoder(), model(), models::usual_format(format)),
         name + ".packed");
  }
  if (is_adapted()) {
    save(models::fuse_lora(encoder(), model()), name + ".fused");
    // In 16 bits mlx has no product with chosen experts on the CPU.
    if (is_f32()) save(models::fuse_lora(encoder(), model(), {true}), name + ".wide");
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Parity, testing::ValuesIn(cases()), name_of_case);

TEST(ParityModels, AreThere) { EXPECT_FALSE(cases().empty()) << models_path(); }

}  // namespace
}  // namespace mlxtape::test
