// Fixture of the op tests: one definition runs on every backend of the build. Memory is guarded:
// a kernel that writes outside its tensors, or leaves an element unwritten, is found.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cases/random.h"
#include "mlxtape/core/encoder.h"
#include "support/oracle.h"

namespace mlxtape::test {

using bench::random_tensor;

class OnDevice : public testing::TestWithParam<Backend> {
 protected:
  void SetUp() override;
  void TearDown() override;

  CommandEncoder& encoder() { return *encoder_; }

  // values in the stored type, on the device. offset moves the first element that far past an
  // aligned address.
  Tensor upload(const std::vector<double>& values, Shape shape, DType dtype,
                std::int64_t offset = 0);
  // The same values as a view whose innermost axis has a stride of 2.
  Tensor upload_strided(const std::vector<double>& values, Shape shape, DType dtype);
  std::vector<double> download(const Tensor& t);
  // Rows, tokens, terms of a test that is large on purpose: fewer on a device that is emulated, which needs a thousand times
  // as long as the one that it stands for. Sizes at which a kernel changes its way are no such thing.
  std::int64_t scaled(std::int64_t n) const;
  // Bytes that a product may take for itself, whatever its size.
  static std::size_t product_room() {
    return GetParam() == Backend::kCuda ? std::size_t{32} << 20U : 0;
  }

 private:
  Device* device_ = nullptr;
  std::unique_ptr<CommandEncoder> encoder_;
};

// Does a processor do what the device would? Its kernels are the real ones.
bool is_emulated(const Device& device);

// Backends that this program is linked with; the cpu always.
std::vector<Backend> built_backends();
std::string backend_name(const testing::TestParamInfo<Backend>& info);

// The stored bits of a tensor, for "the same on every run".
std::vector<unsigned char> bits_of(CommandEncoder& encoder, const Tensor& t);

// Runs make() again and again, on 1, 2, 3 and 5 threads, or 200 times on a GPU; every result must
// have the first one's bits.
void expect_repeatable(CommandEncoder& encoder, const std::function<std::vector<Tensor>()>& make);

// One row of a bad-input table: what a validator said, and what it must say.
struct BadInput {
  const char* what;
  Check check;
  Errc code;
  const char* says;
};
void expect_refused(const std::vector<BadInput>& table);

// call throws an Error of this code whose text holds says.
void expect_error(Errc code, const std::string& says, const std::function<void()>& call);

}  // namespace mlxtape::test

#define MT_ON_EVERY_BACKEND(suite)                                                             \
  INSTANTIATE_TEST_SUITE_P(Devices, suite, testing::ValuesIn(mlxtape::test::built_backends()), \
                           mlxtape::test::backend_name)
