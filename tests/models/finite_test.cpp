#include "mlxtape/models/finite.h"

#include <limits>

#include "mlxtape/models/quantize.h"
#include "small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

constexpr float kInfinite = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A tensor of the host with these numbers.
Tensor of(const std::vector<float>& values, DType dtype) {
  const Tensor t = Device::cpu().empty({static_cast<std::int64_t>(values.size())}, dtype);
  convert(values.data(), DType::kF32, t.data(), dtype, values.size());
  return t;
}

TEST(Nonfinite, CountsInEveryFloatType) {
  const std::vector<float> ends = {0,
                                   -0.0F,
                                   1,
                                   -1,
                                   65504,  // the largest f16
                                   std::numeric_limits<float>::denorm_min()};
  for (const DType type : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    EXPECT_EQ(models::count_nonfinite(of(ends, type)), 0) << name_of(type);
    for (const float bad : {kNan, -kNan, kInfinite, -kInfinite}) {
      // At both ends of vectors, of blocks and of what is left.
      for (const std::size_t size : {1U, 7U, 33U, 131071U, 131072U, 131073U, 300001U}) {
        for (const std::size_t at : {std::size_t{0}, size / 2, size - 1}) {
          std::vector<float> values(size, -3.5F);
          values[at] = bad;
          EXPECT_EQ(models::count_nonfinite(of(values, type)), 1)
              << name_of(type) << " " << bad << " at " << at << " of " << size;
        }
      }
    }
    EXPECT_EQ(models::count_nonfinite(of(std::vector<float>(200000, kNan), type)), 200000);
  }
  const std::vector<float> largest(40, std::numeric_limits<float>::max());
  EXPECT_EQ(models::count_nonfinite(of(largest, DType::kF32)), 0);
  EXPECT_EQ(models::count_nonfinite(of(largest, DType::kF16)), 40);
  EXPECT_EQ(models::count_nonfinite(of({}, DType::kF32)), 0);
  // All bits set is a good number of an integer.
  const Tensor codes = of({4294967040.0F, 1}, DType::kU32);
  EXPECT_EQ(models::count_nonfinite(codes), 0);
}

class ModelNonfinite : public OnDevice {
 protected:
  void plant(const Tensor& t, std::vector<std::int64_t> places, float bad) {
    for (const std::int64_t at : places) {
      const Tensor one = t.reshape({t.size()}).slice(0, at, at + 1);
      encoder().copy(encoder().full({1}, t.dtype(), static_cast<double>(bad)), one);
    }
  }
};

TEST_P(ModelNonfinite, NamesTheFirstTensor) {
  for (const std::string& type : model_types()) {
    models::Model model = small_model(encoder(), type, DType::kBF16);
    EXPECT_FALSE(models::find_nonfinite(encoder(), model).any()) << type;
    const auto all = models::parameters(model);
    for (const models::Parameter& p : all) {
      const Tensor before = encoder().empty_like(p.tensor);
      encoder().copy(p.tensor, before);
      plant(p.tensor, {0, p.tensor.size() - 1}, kNan);
      const models::NonFinite found = models::find_nonfinite(encoder(), model);
      EXPECT_EQ(found.first, p.name);
      EXPECT_EQ(found.numbers, p.tensor.size() == 1 ? 1 : 2) << p.name;
      EXPECT_EQ(found.tensors, 1);
      encoder().copy(before, p.tensor);
    }
    plant(all.back().tensor, {0}, kInfinite);
    plant(all.front().tensor, {0}, kInfinite);
    const models::NonFinite found = models::find_nonfinite(encoder(), model);
    EXPECT_EQ(found.text(), "the tensor " + all.front().name +
                                " has 1 value that is NaN or infinite, as has 1 more tensor");
  }
}

TEST_P(ModelNonfinite, LooksAtScalesAndAdapters) {
  const models::Model plain = small_model(encoder(), "qwen3_next");
  models::Model model = models::quantize_model(encoder(), plain, models::usual_format({4, 32}));
  EXPECT_FALSE(models::find_nonfinite(encoder(), model).any());
  plant(model.weights.embedding.quantized.scales, {1}, -kInfinite);
  EXPECT_EQ(models::find_nonfinite(encoder(), model).first, "model.embed_tokens.scales");
}

MT_ON_EVERY_BACKEND(ModelNonfinite);

TEST(Nonfinite, Text) {
  EXPECT_EQ((models::NonFinite{"a.weight", 3, 1}.text()),
            "the tensor a.weight has 3 values that are NaN or infinite");
  EXPECT_EQ((models::NonFinite{"a.weight", 1, 3}.text()),
            "the tensor a.weight has 1 value that is NaN or infinite, as have 2 more tensors");
}

}  // namespace
}  // namespace mlxtape::test
