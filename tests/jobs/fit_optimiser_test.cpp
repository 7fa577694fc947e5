// The optimisers that fit steps with: by name, their states, and runs that go on.
#include <cmath>

#include "base/sanitizers.h"
#include "jobs/fit_support.h"
#include "mlxtape/formats/json.h"
#include "mlxtape/formats/safetensors.h"

namespace mlxtape::test {
namespace {

using jobs::make_optimiser;
using jobs::OptimiserNumbers;
using jobs::OptimiserPtr;
using jobs::OptimiserSlot;
using jobs::Settings;
using Names = std::vector<std::string>;

class FitOptimiser : public FitTest {};

// Each as a user would have it, for rates of 0.05.
std::vector<OptimiserPtr> all() {
  return {make_optimiser("adamw"),
          make_optimiser("adam", {{"bias_correction", 1}}),
          make_optimiser("sgd"),
          make_optimiser("sgd", {{"momentum", 0.9}, {"nesterov", 1}, {"weight_decay", 0.1}}),
          make_optimiser("muon", {{"adamw_share", 0.5}}),
          make_optimiser("lion", {{"weight_decay", 0.1}})};
}

TEST(Optimisers, AreMadeByName) {
  EXPECT_EQ(jobs::optimiser_names(), (Names{"adamw", "adam", "sgd", "muon", "lion"}));
  for (const std::string& name : jobs::optimiser_names()) {
    const OptimiserPtr made = make_optimiser(name);
    EXPECT_EQ(made->name(), name);
    OptimiserNumbers defaults;
    for (const jobs::OptimiserSetting& s : jobs::optimiser_settings(name)) {
      defaults[s.name] = s.value;
      OptimiserNumbers one{{s.name, s.is_switch || s.name == "ns_steps" ? 1 - s.value : 0.25}};
      if (s.name == "ns_steps") one[s.name] = 3;
      if (name == "sgd" && s.name == "nesterov") one["momentum"] = 0.5;
      EXPECT_NE(make_optimiser(name, one)->settings(), made->settings()) << name << " " << s.name;
      // What a job has for usual is a default and no more.
      EXPECT_EQ(make_optimiser(name, {}, one)->settings(), make_optimiser(name, one)->settings());
      EXPECT_EQ(make_optimiser(name, defaults, one)->settings().at(s.name),
                made->settings().at(s.name));
    }
    EXPECT_EQ(make_optimiser(name, defaults)->settings(), made->settings());
    EXPECT_EQ(make_optimiser(name, {}, {{"warmth", 1}})->settings(), made->settings());
  }
  // A run of one goes on with the other.
  EXPECT_EQ(make_optimiser("adam")->settings(),
            make_optimiser("adamw", {{"weight_decay", 0}})->settings());
  EXPECT_EQ(make_optimiser("adamw")->settings(),
            (Settings{{"optimizer", "adamw"},
                      {"beta1", "0.90000000000000002"},
                      {"beta2", "0.999"},
                      {"eps", "9.9999999392252903e-09"},
                      {"weight_decay", "0.0099999997764825821"},
                      {"bias_correction", "off"}}));
  EXPECT_EQ(jobs::optimiser_settings("sgd", {{"momentum", 0.9}})[0].value, 0.9);
}

TEST(Optimisers, SayWhatIsWrong) {
  const auto refused = [](const std::string& says, const std::string& name,
                          const OptimiserNumbers& given = {}) {
    expect_error(Errc::kArgument, says, [&] { make_optimiser(name, given); });
  };
  refused("must be one of adamw, adam, sgd, muon, lion, got adafactor", "adafactor");
  refused("lion has no setting momentum; it has beta1, beta2, weight_decay", "lion",
          {{"momentum", 0.9}});
  refused("adam has no setting weight_decay", "adam", {{"weight_decay", 0.1}});
  refused("nesterov must be 1 for on or 0 for off, got 2", "muon", {{"nesterov", 2}});
  refused("ns_steps must be a whole number, got 2.5", "muon", {{"ns_steps", 2.5}});
  refused("ns_steps must be from 1 to 100, got 0", "muon", {{"ns_steps", 0}});
  refused("adamw_share must be at least 0 and finite, got -1", "muon", {{"adamw_share", -1}});
  refused("beta2 must be in [0, 1)", "muon", {{"beta2", 1}});
  refused("beta1 must be in [0, 1)", "adamw", {{"beta1", 1}});
  refused("beta1 must be in [0, 1)", "lion", {{"beta1", -1}});
  refused("nesterov needs momentum", "sgd", {{"nesterov", 1}});
}

TEST(Optimisers, NameTheirStates) {
  const jobs::Trainable matrix{"w", Tensor::meta({4, 4})}, stack{"e", Tensor::meta({2, 4, 4})};
  const jobs::Trainable table{"t", Tensor::meta({4, 4}), false}, norm{"n", Tensor::meta({4})};
  const Names moments{"adamw.m", "adamw.v"}, velocity{"muon.v"};
  EXPECT_EQ(make_optimiser("adamw")->states(matrix), moments);
  EXPECT_EQ(make_optimiser("adam")->states(matrix), moments);
  EXPECT_EQ(make_optimiser("sgd")->states(matrix), Names{});
  EXPECT_EQ(make_optimiser("sgd", {{"momentum", 0.5}})->states(matrix), Names{"sgd.v"});
  EXPECT_EQ(make_optimiser("lion")->states(matrix), Names{"lion.m"});
  const OptimiserPtr muon = make_optimiser("muon");
  EXPECT_EQ(muon->states(matrix), velocity);
  EXPECT_EQ(muon->states(stack), velocity);
  EXPECT_EQ(muon->states(table), moments);
  EXPECT_EQ(muon->states(norm), moments);
  EXPECT_FALSE(muon->takes_rows(matrix));
  EXPECT_TRUE(muon->takes_rows(table));
}

// Each does what its op does: fit's numbers, masters, rows and scale reach it.
TEST_P(FitOptimiser, StepsAsItsOpsDo) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const OptimiserPtr& optimiser : all()) {
      SCOPED_TRACE(optimiser->name() + " " + name_of(dtype));
      FitOptions o = options(1);
      o.optimiser = optimiser;
      o.warmup = 0;
      o.cosine = false;
      o.clip = 0;
      const Toy toy(encoder(), dtype), by_hand(encoder(), dtype);
      run(toy, o);

      Tape tape(encoder());
      const Recorded r = by_hand.record_batch(tape, 0);
      for (const Tensor& x : r.watched) tape.watch(x, DType::kF32);
      tape.backward(r.loss);
      std::vector<OptimiserSlot> slots =
          jobs::make_slots(encoder(), *optimiser, by_hand.trainables);
      for (std::size_t i = 0; i < slots.size(); ++i) {
        EXPECT_EQ(slots[i].master.defined(), dtype != DType::kF32);
        if (tape.has_row_grad(r.watched[i])) {
          const RowGrad rows = tape.row_grad(r.watched[i]);
          slots[i].grad = rows.rows;
          slots[i].ids = rows.ids;
        } else {
          slots[i].grad = encoder().contiguous(tape.grad(r.watched[i]));
        }
      }
      const Tensor t = upload({1}, {1}, DType::kI32);
      optimiser->step(encoder(), slots, {upload({0.05}, {1}, DType::kF32), t});
      EXPECT_TRUE(toy.bits() == by_hand.bits());
      EXPECT_TRUE(toy.bits() != Toy(encoder(), dtype).bits());
    }
  }
}

TEST_P(FitOptimiser, Learns) {
  for (const OptimiserPtr& optimiser : all()) {
    FitOptions o = options(60);
    o.optimiser = optimiser;
    if (optimiser->name() == "lion") o.learning_rate = 0.01;
    if (optimiser->name() == "sgd") o.learning_rate = 0.3;
    const FitResult result = run(Toy(encoder(), DType::kF32), o);
    EXPECT_LT(result.best_loss, 0.6 * result.validations[0].loss) << optimiser->name();
  }
}

TEST_P(FitOptimiser, StoppedAnywhereItGoesOnWithTheSameBits) {
  int number = 0;
  for (const OptimiserPtr& optimiser : all()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      FitOptions o = options();
      o.optimiser = optimiser;
      o.save_every = 0;
      const Toy whole(encoder(), dtype);
      const FitResult want = run(whole, o);
      for (const std::int64_t k : {1, 3, 6}) {
        o.folder = folder_ / std::to_string(number++);
        o.resume = true;
        SCOPED_TRACE(optimiser->name() + " " + name_of(dtype) + " " + std::to_string(k));
        expect_resumable(dtype, o, k, whole, want);
      }
    }
  }
}

#ifndef MT_THREAD_SANITIZER  // ThreadSanitizer does not follow threads into a child
TEST_P(FitOptimiser, KilledAnywhereItGoesOnWithTheSameBits) {
  if (GetParam() != Backend::kCpu) GTEST_SKIP() << "a forked child cannot use the parent's device";
  int number = 0;
  for (const OptimiserPtr& optimiser : all()) {
    SCOPED_TRACE(optimiser->name());
    FitOptions o = in_folder("killed" + std::to_string(number++), 40);
    o.optimiser = optimiser;
    expect_survives_kills(o, 4);
  }
}
#endif

// What runs of AdamW wrote before there was a choice: the same tensors, and settings that do not name it.
TEST_P(FitOptimiser, AStateThatNamesNoneIsAdamWs) {
  FitOptions o = in_folder("older");
  std::int64_t steps = 0;
  FitHooks hooks;
  hooks.on_step = [&](std::int64_t step) {
    steps = step;
  };
  hooks.stop = [&] {
    return steps == 3;
  };
  run(Toy(encoder(), DType::kBF16), o, hooks);
  const std::string path = o.folder + "/state.safetensors", older = folder_ / "copy.safetensors";
  {
    const formats::SafetensorsFile file(path);
    Names names = file.names();
    std::sort(names.begin(), names.end());
    EXPECT_EQ(names, (Names{"__checksum__", "adamw.m:embedding", "adamw.m:head", "adamw.m:mix",
                            "adamw.v:embedding", "adamw.v:head", "adamw.v:mix", "embedding", "head",
                            "mix"}));
    std::vector<formats::NamedTensor> tensors;
    for (const std::string& name : file.names()) {
      if (name != "__checksum__") tensors.push_back({name, file.tensor(name)});
    }
    auto metadata = file.metadata();
    formats::Json settings = formats::Json::parse(metadata.at("options"), "test");
    settings.erase("optimizer");
    metadata["options"] = settings.dump();
    formats::write_checked_safetensors(older, tensors, metadata);
  }
  std::filesystem::rename(older, path);
  const Toy rest(encoder(), DType::kBF16), whole(encoder(), DType::kBF16);
  expect_same(run(rest, o), run(whole, options()));
  EXPECT_TRUE(rest.bits() == whole.bits());
}

// ---- one of a user's own ----

// Steps by the sign of the gradient, and counts in a state of its own.
class SignStep final : public jobs::Optimiser {
 public:
  std::string name() const override { return "sign"; }
  Settings settings() const override { return {{"times", "1"}}; }
  std::vector<std::string> states(const jobs::Trainable& /*of*/) const override {
    return {"sign.steps"};
  }
  bool takes_rows(const jobs::Trainable& /*of*/) const override { return false; }
  void step(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots,
            const ops::StepNumbers& numbers) const override {
    for (const OptimiserSlot& s : slots) {
      EXPECT_FALSE(s.ids.defined());
      const Tensor one = encoder.full(s.grad.shape(), DType::kF32, 1);
      encoder.add_into(s.states[0], one);
      const Tensor up =
          ops::where(encoder, ops::less(encoder, s.grad, encoder.zeros({}, DType::kF32)), one,
                     ops::negative(encoder, one));
      encoder.add_into(s.w, ops::multiply(encoder, up, numbers.lr));
    }
  }
};

TEST_P(FitOptimiser, AUsersOwn) {
  FitOptions o = options();
  o.optimiser = std::make_shared<SignStep>();
  o.save_every = 0;
  const Toy whole(encoder(), DType::kF32);
  const FitResult want = run(whole, o);
  o.folder = folder_ / "own";
  o.resume = true;
  expect_resumable(DType::kF32, o, 3, whole, want);
  const formats::SafetensorsFile file(o.folder + "/state.safetensors");
  const Tensor counted = file.tensor("sign.steps:mix");
  EXPECT_EQ(*static_cast<const float*>(counted.data()), 8.0F);
  o.optimiser = adamw({});
  expect_error(Errc::kArgument, "optimizer must be sign to resume it, got adamw",
               [&] { run(Toy(encoder(), DType::kF32), o); });
}

MT_ON_EVERY_BACKEND(FitOptimiser);

}  // namespace
}  // namespace mlxtape::test
