// Steps of mlx.optimizers, with its numbers: three with lr 0.1 and the options that are said, the parameters after each and
// the states at the end.
#include "support/optimiser_support.h"

namespace mlxtape::test {
namespace {

using ops::AdamWOptions;
using ops::AdamWSlot;
using ops::LionOptions;
using ops::LionSlot;
using ops::SgdOptions;
using ops::SgdSlot;

constexpr DType kF32 = DType::kF32;
const Values kStart{1, -2, 0.5, 3};
const Values kGrads[] = {{0.5, -1, 2, 0.25}, {-0.25, 1, 0.5, 0}, {1, 1, -1, 0.125}};

class OptimiserAsMlx : public OptimiserTest {
 protected:
  void expect(const char* what, const Tensor& t, const Values& want) {
    expect_close(what, download(t), refs_of(want, 1), kF32, 8);
  }
};

TEST_P(OptimiserAsMlx, AdamWAndAdam) {
  const auto adamw = [&](const AdamWOptions& options, const std::vector<Values>& w,
                         const Values& end_m, const Values& end_v) {
    AdamWSlot s{
        upload(kStart, {4}, kF32), {}, encoder().zeros({4}, kF32), encoder().zeros({4}, kF32)};
    const Tensor t = count(0);
    for (std::size_t i = 0; i < 3; ++i) {
      s.grad = upload(kGrads[i], {4}, kF32);
      ops::advance(encoder(), t);
      ops::adamw_step(encoder(), {s}, {number(0.1), t}, options);
      expect("w", s.w, w[i]);
    }
    expect_close("m", download(s.m), refs_of(end_m), kF32, 8);
    expect_close("v", download(s.v), refs_of(end_v), kF32, 8);
  };
  const Values plain_m{0.118000001, 0.109000005, 0.106999986, 0.0327499993};
  const Values plain_v{0.00131193781, 0.00299700117, 0.00524175446, 7.80000701e-05};
  adamw({},  // AdamW(0.1)
        {{0.682772398, -1.68177235, 0.183272272, 2.68077254},
         {0.56890732, -1.70245683, -0.169880971, 2.39334488},
         {0.242557734, -1.89985979, -0.317501187, 2.02013159}},
        plain_m, plain_v);
  adamw({.bias_correction = true},  // AdamW(0.1, bias_correction=True)
        {{0.899000704, -1.89800072, 0.399500668, 2.89700055},
         {0.871468246, -1.90136588, 0.316042244, 2.82709837},
         {0.804785848, -1.9396857, 0.285871148, 2.74936175}},
        plain_m, plain_v);
  const Values m{0.145507812, 0.138671875, 0.12109375, 0.0395507812};
  const Values v{0.040473938, 0.0908508301, 0.15612793, 0.00232124329};
  AdamWOptions o{.beta1 = 0.875, .beta2 = 0.96875};
  adamw(o,  // AdamW(0.1, betas=[0.875, 0.96875])
        {{0.928289354, -1.92728937, 0.428789318, 2.92628932},
         {0.90334183, -1.93166149, 0.350025564, 2.86050105},
         {0.830111861, -1.97573686, 0.319029003, 2.77554965}},
        m, v);
  o.weight_decay = 0;
  adamw(o,  // Adam(0.1, betas=[0.875, 0.96875])
        {{0.929289341, -1.92928934, 0.429289311, 2.92928934},
         {0.9052701, -1.93558872, 0.350954354, 2.86642742},
         {0.832943439, -1.98159575, 0.320307821, 2.78433657}},
        m, v);
  o.bias_correction = true;
  adamw(o,  // Adam(0.1, betas=[0.875, 0.96875], bias_correction=True)
        {{0.899999976, -1.89999998, 0.399999976, 2.9000001},
         {0.874580443, -1.90666664, 0.317098051, 2.83347344},
         {0.808534503, -1.94867849, 0.289112806, 2.7585113}},
        m, v);
  // AdamW(0.1, bias_correction=True, weight_decay=0.05, betas=[0.8, 0.95], eps=1e-6)
  adamw({.beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6F, .weight_decay = 0.05F, .bias_correction = true},
        {{0.89500016, -1.8900001, 0.397500038, 2.88500047},
         {0.869279265, -1.89166129, 0.314558893, 2.80690026},
         {0.796543479, -1.92974389, 0.291607827, 2.71936274}},
        {0.224000007, 0.231999993, 0.136000022, 0.0570000038},
        {0.0642499998, 0.142624989, 0.242375001, 0.00360156246});
}

TEST_P(OptimiserAsMlx, Sgd) {
  const auto sgd = [&](const SgdOptions& options, const std::vector<Values>& w,
                       const Values& velocity) {
    SgdSlot s{upload(kStart, {4}, kF32), {}};
    if (options.momentum != 0) s.v = encoder().zeros({4}, kF32);
    for (std::size_t i = 0; i < 3; ++i) {
      s.grad = upload(kGrads[i], {4}, kF32);
      ops::sgd_step(encoder(), {s}, {number(0.1), {}}, options);
      expect("w", s.w, w[i]);
    }
    if (options.momentum != 0) expect("v", s.v, velocity);
  };
  sgd({},
      {{0.949999988, -1.89999998, 0.300000012, 2.9749999},
       {0.974999964, -2, 0.25, 2.9749999},
       {0.87499994, -2.0999999, 0.349999994, 2.96249986}},
      {});
  sgd({.weight_decay = 0.1F},
      {{0.939999998, -1.88, 0.295000017, 2.94499993},
       {0.955600023, -1.9612, 0.242050022, 2.91554999},
       {0.846044004, -2.04158807, 0.339629531, 2.87389445}},
      {});
  sgd({.momentum = 0.9F},
      {{0.949999988, -1.89999998, 0.300000012, 2.9749999},
       {0.930000007, -1.90999997, 0.0700000077, 2.95249987},
       {0.812000036, -2.01900005, -0.0369999856, 2.91974998}},
      {1.17999995, 1.09000003, 1.06999993, 0.327499986});
  sgd({.momentum = 0.9F, .weight_decay = 0.1F, .dampening = 0.3F},
      {{0.958000004, -1.91600001, 0.3565, 2.96149993},
       {0.930994034, -1.89698803, 0.189854488, 2.90611935},
       {0.830171704, -1.9365983, 0.108544551, 2.82718396}},
      {1.00822353, 0.396102816, 0.813099325, 0.789352834});
  sgd({.momentum = 0.9F, .weight_decay = 0.1F, .nesterov = true},
      {{0.885999978, -1.77199996, 0.110500008, 2.89549994},
       {0.868065953, -1.83113194, -0.152649492, 2.79593539},
       {0.630906105, -1.96550727, -0.150589198, 2.655514}},
      {1.4275465, 0.585406721, 1.10518003, 1.11068857});
}

TEST_P(OptimiserAsMlx, Lion) {
  const auto lion = [&](const LionOptions& options, const std::vector<Values>& w,
                        const Values& end_m) {
    LionSlot s{upload(kStart, {4}, kF32), {}, encoder().zeros({4}, kF32)};
    for (std::size_t i = 0; i < 3; ++i) {
      s.grad = upload(kGrads[i], {4}, kF32);
      ops::lion_step(encoder(), {s}, {number(0.1), {}}, options);
      expect("w", s.w, w[i]);
    }
    expect_close("m", download(s.m), refs_of(end_m), kF32, 8);
  };
  lion({},  // Lion(0.1)
       {{0.899999976, -1.89999998, 0.400000006, 2.9000001},
        {1, -2, 0.300000012, 2.80000019},
        {0.899999976, -2.0999999, 0.400000006, 2.70000029}},
       {0.0124255, 0.0100989994, 0.014551999, 0.00370025006});
  lion({.beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1F},
       {{0.889999986, -1.88, 0.395000011, 2.87000012},
        {0.981100023, -1.9612, 0.291050017, 2.74130034},
        {0.871289015, -2.04158807, 0.388139516, 2.61388755}},
       {0.060687501, 0.0523750037, 0.0639999956, 0.0175312497});
  lion({.beta1 = 0.5, .beta2 = 0.5},  // at the second step the first weight stays: its c is 0
       {{0.899999976, -1.89999998, 0.400000006, 2.9000001},
        {0.899999976, -2, 0.300000012, 2.80000019},
        {0.799999952, -2.0999999, 0.400000006, 2.70000029}},
       {0.5, 0.625, -0.125, 0.09375});
}

TEST_P(OptimiserAsMlx, Muon) {
  struct Case {
    Shape shape;
    ops::MuonOptions options;
    Values w;
    std::vector<Values> grads, want;
    Values v;
  };
  const Case cases[] = {
      {{2, 3},  // Muon(0.1)
       {},
       {-0.734375, 0.6875, 0.53125, -0.484375, -0.015625, -0.09375},
       {{0.296875, 0.578125, -0.8125, -0.9375, 0.671875, -0.140625},
        {0.53125, -1, -0.109375, 0.4375, -0.546875, 0.890625},
        {0.796875, -0.9375, -0.953125, 0.078125, 0.875, -0.234375}},
       {{-0.75900507, 0.63579762, 0.601998806, -0.401270419, -0.0754585415, -0.0806259438},
        {-0.823644996, 0.705595255, 0.653177857, -0.397597492, -0.058450453, -0.155506641},
        {-0.870060921, 0.728358448, 0.708669305, -0.414448529, -0.13574779, -0.129993632}},
       {0.0773708671, -0.0673220754, -0.0886633545, -0.0182251651, 0.0480196811, 0.0240818784}},
      {{3, 2},  // Muon(0.1, momentum=0.5, weight_decay=0, nesterov=False)
       {.momentum = 0.5, .weight_decay = 0, .nesterov = false},
       {0.90625, 0.890625, -0.890625, -0.828125, 0.671875, 0.46875},
       {{0.34375, -0.390625, 0.21875, 0.21875, 0.15625, -0.6875},
        {-0.140625, -0.21875, 0.453125, 0.984375, 0.90625, 0.09375},
        {-0.109375, -0.46875, -0.921875, -0.9375, -0.0625, -0.359375}},
       {{0.822298348, 0.914019227, -0.982617021, -0.87516588, 0.675800323, 0.546958745},
        {0.821868956, 0.954711258, -1.04355597, -0.986670017, 0.582629919, 0.565516591},
        {0.835266531, 1.0499841, -0.953704059, -0.931363344, 0.522663295, 0.633605063}},
       {-0.046875, -0.337890625, -0.3203125, -0.1953125, 0.21484375, -0.2421875}},
      {{4, 2},  // Muon(0.1, ns_steps=2, weight_decay=0.1)
       {.weight_decay = 0.1F, .ns_steps = 2},
       {-0.53125, 0.09375, -0.265625, 0.203125, 0.25, -0.875, -0.96875, 0.671875},
       {{-0.484375, -0.53125, 0.984375, -0.0625, 0.671875, -0.046875, 0.28125, -0.703125},
        {0.265625, 0.734375, 0.046875, 0.484375, 0.34375, -0.875, 0.515625, 0.1875},
        {-0.390625, -0.9375, 0.734375, -0.046875, 0.4375, 0.75, 0.421875, 0.84375}},
       {{-0.485442281, 0.175823241, -0.34924382, 0.211809829, 0.188949212, -0.852157056,
         -0.986131787, 0.773605049},
        {-0.496680826, 0.122559533, -0.429560035, 0.146082103, 0.122300528, -0.76469028,
         -1.05726314, 0.761203468},
        {-0.463556051, 0.202801958, -0.525174379, 0.150240481, 0.0437090248, -0.763413787,
         -1.09263659, 0.686350048}},
       {-0.035958007, -0.0340938382, 0.0783598945, 0.0204968583, 0.0711586177, -0.0179973654,
        0.0439354181, 0.0298777111}}};
  for (const Case& c : cases) {
    ops::MuonSlot s{upload(c.w, c.shape, kF32), {}, encoder().zeros(c.shape, kF32)};
    for (std::size_t i = 0; i < 3; ++i) {
      s.grad = upload(c.grads[i], c.shape, kF32);
      ops::muon_step(encoder(), {s}, {number(0.1), {}}, c.options);
      expect_close("w", download(s.w), refs_of(c.want[i], 1), kF32, 64);
    }
    expect_close("v", download(s.v), refs_of(c.v), kF32, 8);
  }
}

TEST_P(OptimiserAsMlx, ClipGradNorm) {
  // mlx.optimizers.clip_grad_norm(…, 1): a gradient times our scale
  const auto norm =
      ops::grad_norm(encoder(), {upload(kGrads[0], {4}, kF32), upload(kGrads[1], {4}, kF32)}, 1);
  expect("norm", norm.norm, {2.57390761});
  expect("scale", norm.scale, {0.388514191});
}

MT_ON_EVERY_BACKEND(OptimiserAsMlx);

}  // namespace
}  // namespace mlxtape::test
