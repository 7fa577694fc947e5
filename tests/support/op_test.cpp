#include "support/op_test.h"

#include <algorithm>
#include <string>

#include "core/op_kernels.h"
#include "mlxtape/core/threads.h"

namespace mlxtape::test {

namespace {

std::vector<unsigned char> stored(const std::vector<double>& values, DType dtype) {
  std::vector<unsigned char> bytes(values.size() * size_of(dtype));
  convert(values.data(), DType::kF64, bytes.data(), dtype, values.size());
  return bytes;
}

}  // namespace

void OnDevice::SetUp() {
  for (Device* device : Device::all()) {
    if (device->backend() == GetParam()) device_ = device;
  }
  if (device_ == nullptr) {
    std::string reason;
    for (const AbsentDevice& absent : Device::absent()) {
      if (absent.backend == GetParam()) reason = ": " + absent.reason;
    }
    GTEST_SKIP() << "no " << name_of(GetParam()) << " device here" << reason;
  }
  set_flushes_subnormals(GetParam() == Backend::kMetal);
  if (is_emulated(*device_)) device_->set_option("strict", 1);
  device_->memory().set_guarded(true);
  encoder_ = device_->make_encoder();
}

void OnDevice::TearDown() {
  if (device_ == nullptr) return;
  EXPECT_NO_THROW(encoder_->commit_and_wait());
  EXPECT_NO_THROW(device_->memory().check_guards());
  device_->memory().set_guarded(false);
}

Tensor OnDevice::upload(const std::vector<double>& values, Shape shape, DType dtype,
                        std::int64_t offset) {
  const auto n = static_cast<std::int64_t>(values.size());
  const Tensor room = encoder_->empty({n + offset}, dtype);
  const Tensor t = room.slice(0, offset, n + offset).reshape(shape);
  const std::vector<unsigned char> bytes = stored(values, dtype);
  encoder_->upload(bytes.data(), bytes.size(), t);
  return t;
}

Tensor OnDevice::upload_strided(const std::vector<double>& values, Shape shape, DType dtype) {
  std::vector<double> spread(2 * values.size(), std::nan(""));
  for (std::size_t i = 0; i < values.size(); ++i) spread[2 * i] = values[i];
  Shape wide = shape;
  wide.push_back(2);
  return upload(spread, wide, dtype).select(-1, 0);
}

std::vector<double> OnDevice::download(const Tensor& t) {
  const std::vector<unsigned char> bytes = bits_of(*encoder_, t);
  std::vector<double> values(static_cast<std::size_t>(t.size()));
  convert(bytes.data(), t.dtype(), values.data(), DType::kF64, values.size());
  return values;
}

bool is_emulated(const Device& device) {
  return device.name().find("(emulated)") != std::string::npos;
}

std::int64_t OnDevice::scaled(std::int64_t n) const {
  return is_emulated(*device_) ? std::max<std::int64_t>(1, n / 16) : n;
}

std::vector<Backend> built_backends() {
  std::vector<Backend> found{Backend::kCpu};
  for (const OpKernels& each : op_kernels()) {
    if (std::find(found.begin(), found.end(), each.backend) == found.end()) {
      found.push_back(each.backend);
    }
  }
  return found;
}

std::string backend_name(const testing::TestParamInfo<Backend>& info) {
  return name_of(info.param);
}

std::vector<unsigned char> bits_of(CommandEncoder& encoder, const Tensor& t) {
  std::vector<unsigned char> bytes(t.bytes());
  encoder.download(encoder.contiguous(t), bytes.data(), bytes.size());
  return bytes;
}

void expect_repeatable(CommandEncoder& encoder, const std::function<std::vector<Tensor>()>& make) {
  const int before = threads();
  std::vector<std::vector<unsigned char>> first;
  const auto run = [&](const std::string& how) {
    const std::vector<Tensor> results = make();
    for (std::size_t i = 0; i < results.size(); ++i) {
      std::vector<unsigned char> bits = bits_of(encoder, results[i]);
      if (first.size() <= i) {
        first.push_back(std::move(bits));
      } else {
        EXPECT_TRUE(bits == first[i]) << "result " << i << " differs " << how;
      }
    }
  };
  if (encoder.backend() != Backend::kCpu) {
    // Blocks meet in another order each time; an emulated device draws one.
    const int runs = is_emulated(encoder.device()) ? 4 : 200;
    for (int i = 0; i < runs && !testing::Test::HasFailure(); ++i)
      run("in run " + std::to_string(i));
    return;
  }
  for (const int count : {1, 2, 2, 3, 5, before}) {
    set_threads(count);
    run("on " + std::to_string(count) + " threads");
  }
}

void expect_refused(const std::vector<BadInput>& table) {
  for (const BadInput& row : table) {
    ASSERT_TRUE(row.check) << row.what;
    EXPECT_EQ(row.check->code(), row.code) << row.what << ": " << row.check->what();
    EXPECT_NE(std::string(row.check->what()).find(row.says), std::string::npos)
        << row.what << ": " << row.check->what();
  }
}

void expect_error(Errc code, const std::string& says, const std::function<void()>& call) {
  try {
    call();
    FAIL() << "nothing was thrown; must say: " << says;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    EXPECT_NE(std::string(e.what()).find(says), std::string::npos) << e.what();
  }
}

}  // namespace mlxtape::test
