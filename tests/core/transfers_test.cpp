// Between the host and the device, and when each may go on.
#include <numeric>

#include "mlxtape/ops/elementwise.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

class Transfers : public OnDevice {
 protected:
  static std::vector<float> counting(std::int64_t n, float first) {
    std::vector<float> values(static_cast<std::size_t>(n));
    std::iota(values.begin(), values.end(), first);
    return values;
  }
  std::vector<float> read(const Tensor& t) {
    std::vector<float> values(static_cast<std::size_t>(t.size()));
    encoder().download(t, values.data(), t.bytes());
    return values;
  }
};

// Of a few bytes, of many more than any piece of memory that uploads go through, and of all at once.
TEST_P(Transfers, TheHostsMemoryMayChangeAfterAnUpload) {
  std::vector<Tensor> there;
  std::vector<std::vector<float>> want;
  for (const std::int64_t n : {1, 7, 64, 65, 100'000, 2'097'152, 2'097'153, 12'000'001, 3}) {
    std::vector<float> values = counting(n, static_cast<float>(n % 1000));
    want.push_back(values);
    there.push_back(encoder().empty({n}, DType::kF32));
    encoder().upload(values.data(), there.back().bytes(), there.back());
    std::fill(values.begin(), values.end(), -1.0F);
  }
  for (std::size_t i = 0; i < there.size(); ++i) EXPECT_TRUE(read(there[i]) == want[i]) << i;
}

// More small ones than fit into all pieces, each read by a kernel of its own.
TEST_P(Transfers, ManySmallUploads) {
  const Tensor numbers = encoder().empty({1024}, DType::kF32);
  const Tensor sum = encoder().zeros({1024}, DType::kF32);
  std::vector<float> want(1024);
  for (int i = 0; i < 9000; ++i) {
    const std::vector<float> values(1024, static_cast<float>(i % 16));
    encoder().upload(values.data(), numbers.bytes(), numbers);
    encoder().add_into(sum, numbers);
    for (float& w : want) w += static_cast<float>(i % 16);
  }
  EXPECT_TRUE(read(sum) == want);
}

TEST_P(Transfers, ADownloadIsOfItsPlaceInTheOrder) {
  const Tensor x = encoder().full({3, 1000}, DType::kF32, 0);
  const Tensor one = encoder().full({3, 1000}, DType::kF32, 1);
  std::vector<std::unique_ptr<PendingDownload>> pending;
  for (int i = 0; i < 40; ++i) {
    pending.push_back(encoder().begin_download(x));
    encoder().add_into(x, one);
  }
  for (const std::size_t i : {39U, 0U, 17U}) {
    const auto* values = static_cast<const float*>(pending[i]->wait());
    for (int j = 0; j < 3000; ++j) ASSERT_EQ(values[j], static_cast<float>(i)) << j;
  }
  pending.clear();  // those that nobody waited for, too
  const auto later = encoder().begin_download(x);
  EXPECT_EQ(static_cast<const float*>(later->wait())[0], 40);
  EXPECT_NE(encoder().begin_download(encoder().empty({0}, DType::kF32))->wait(), &later);
}

TEST_P(Transfers, PlaceIsTheTensorItselfWhereTheHostsMemoryIsTheDevices) {
  std::vector<float> values = counting(100, 5);
  const Tensor host = Tensor::wrap(values.data(), {100});
  const Tensor there = encoder().place(host);
  EXPECT_EQ(there.device(), &encoder().device());
  EXPECT_EQ(there.data() == host.data(), encoder().device().traits().uses_host_memory);
  EXPECT_TRUE(read(there) == values);
}

TEST_P(Transfers, SaysWhatIsWrong) {
  const Tensor x = encoder().zeros({4, 4}, DType::kF32);
  expect_error(Errc::kShape, "begin_download: a contiguous tensor",
               [&] { encoder().begin_download(x.transpose({1, 0})); });
  encoder().begin_capture();
  EXPECT_THROW(encoder().begin_download(x), Error);
  static_cast<void>(encoder().end_capture());
  EXPECT_EQ(static_cast<const float*>(encoder().begin_download(x)->wait())[15], 0);
}

MT_ON_EVERY_BACKEND(Transfers);

}  // namespace
}  // namespace mlxtape::test
