// What the gated delta rule does with numbers that are none.
#include <cmath>
#include <vector>

#include "mlxtape/ops/gated_delta_rule.h"
#include "support/nan.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

class GatedDeltaRuleEdges : public OnDevice {};

// From its token on NaN fills the head's state; the other head knows nothing of it.
TEST_P(GatedDeltaRuleEdges, NaNStaysInItsHead) {
  constexpr std::int64_t kTokens = 70, kBad = 20;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Noise noise(3);
    const auto random = [&](const Shape& shape, DType type) {
      return upload(random_values(noise, *element_count(shape), type), shape, type);
    };
    std::vector<double> decay(kTokens * 2, -0.5);
    decay[kBad * 2 + 1] = NAN;
    const ops::GatedDeltaRuleInputs in{
        random({1, kTokens, 1, 8}, dtype), random({1, kTokens, 1, 8}, dtype),
        random({1, kTokens, 2, 8}, dtype), upload(decay, {1, kTokens, 2}, DType::kF32),
        upload(std::vector<double>(kTokens * 2, 0.5), {1, kTokens, 2}, DType::kF32)};
    ops::GatedDeltaRuleOptions options;
    options.normalise = true;
    options.want_final_state = true;
    const auto r = ops::gated_delta_rule(encoder(), in, options);
    EXPECT_EQ(nans_of(download(r.final_state)), places(64, 64));
    const std::vector<double> y = download(r.y);
    for (std::size_t i = 0; i < y.size(); ++i) {
      const bool first_head = i / 8 % 2 == 0, later = i / 16 >= kBad;
      if (first_head || later) {
        ASSERT_EQ(std::isnan(y[i]), !first_head) << i;
      }
    }
  }
}

MT_ON_EVERY_BACKEND(GatedDeltaRuleEdges);

}  // namespace
}  // namespace mlxtape::test
