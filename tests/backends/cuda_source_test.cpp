// Kernels from source. Compiling needs NVRTC but no GPU; running them does.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "backends/cuda/library.h"
#include "backends/cuda/source_kernel.h"
#include "mlxtape/base/files.h"
#include "mlxtape/core/encoder.h"

namespace mlxtape {
namespace {

namespace fs = std::filesystem;

constexpr const char* kScale = R"(
struct Args { long long n; float by; };
extern "C" __global__ void scale(const float* x, float* y, Args args) {
  const long long i = blockIdx.x * 128LL + threadIdx.x;
  if (i < args.n) y[i] = x[i] * args.by;
}
)";
struct ScaleArgs {
  std::int64_t n;
  float by;
};

Grid scale_grid(const KernelCall& call) {
  const auto n = static_cast<std::uint32_t>(call.as<ScaleArgs>().n);
  return {{(n + 127) / 128, 1, 1}, {128, 1, 1}, 0};
}

SourceKernel scale_kernel(const std::string& name) {
  return {name, "scale", kScale, scale_grid, {}};
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

struct CudaSource : testing::Test {
  void SetUp() override {
    if (!cuda::nvrtc().is_open()) GTEST_SKIP() << "NVRTC is absent: " << cuda::nvrtc().reason();
    std::string pattern = (fs::temp_directory_path() / "mlxtape-cache-XXXXXX").string();
    folder = mkdtemp(pattern.data());
    set_kernel_cache(folder / "below");
  }
  void TearDown() override {
    set_kernel_cache("");
    if (!folder.empty()) fs::remove_all(folder);
  }

  std::vector<fs::path> kept() const {
    std::vector<fs::path> files;
    for (const auto& file : fs::directory_iterator(folder / "below")) files.push_back(file.path());
    return files;
  }
  fs::path folder;
};

TEST_F(CudaSource, IsCompiledOnceAndThenFoundOnDisk) {
  const cuda::Compiled first = cuda::compile(scale_kernel("a"), 90);
  EXPECT_FALSE(first.was_kept);
  EXPECT_EQ(first.code.substr(1, 3), "ELF");
  const cuda::Compiled second = cuda::compile(scale_kernel("another name"), 90);
  EXPECT_TRUE(second.was_kept);
  EXPECT_EQ(second.code, first.code);
  EXPECT_EQ(kept().size(), 1U);
}

TEST_F(CudaSource, AnotherTextOptionOrDeviceIsAnotherFile) {
  cuda::compile(scale_kernel("a"), 90);
  SourceKernel changed = scale_kernel("a");
  changed.source += "// more\n";
  EXPECT_FALSE(cuda::compile(changed, 90).was_kept);
  SourceKernel fast = scale_kernel("a");
  fast.options = {"--use_fast_math"};
  EXPECT_FALSE(cuda::compile(fast, 90).was_kept);
  EXPECT_FALSE(cuda::compile(scale_kernel("a"), 100).was_kept);
  EXPECT_EQ(kept().size(), 4U);
}

TEST_F(CudaSource, ADamagedFileIsMadeAgain) {
  const std::string code = cuda::compile(scale_kernel("a"), 90).code;
  const std::string path = kept().at(0);
  const std::string whole = read_whole(path, "test");
  std::string flipped = whole;
  flipped[whole.size() - 100] ^= 1;
  std::string other_key = whole;
  other_key[40] ^= 1;
  for (const std::string& bad :
       {std::string(), whole.substr(0, 20), whole.substr(0, whole.size() - 1), whole + "x", flipped,
        other_key}) {
    write_whole(path, bad, "test");
    const cuda::Compiled again = cuda::compile(scale_kernel("a"), 90);
    EXPECT_FALSE(again.was_kept) << bad.size();
    EXPECT_EQ(again.code, code);
    EXPECT_EQ(read_whole(path, "test"), whole);
  }
}

TEST_F(CudaSource, WorksWhereNothingCanBeKept) {
  set_kernel_cache("/dev/null/none");
  EXPECT_FALSE(cuda::compile(scale_kernel("a"), 90).was_kept);
  EXPECT_FALSE(cuda::compile(scale_kernel("a"), 90).was_kept);
}

TEST_F(CudaSource, ATextWithFilesOfItsOwnIsNotKept) {
  write_whole(folder / "mine.h", "#define BY 2", "test");
  SourceKernel own = scale_kernel("a");
  own.source = "#include \"mine.h\"\nextern \"C\" __global__ void scale(float* y) { *y = BY; }";
  own.options = {"--include-path=" + folder.string()};
  const std::string before = cuda::compile(own, 90).code;
  write_whole(folder / "mine.h", "#define BY 3", "test");
  const cuda::Compiled after = cuda::compile(own, 90);
  EXPECT_FALSE(after.was_kept);
  EXPECT_NE(after.code, before);
}

TEST_F(CudaSource, AMistakeComesBackInTheCompilersWords) {
  SourceKernel wrong = scale_kernel("my_scale");
  wrong.source = "extern \"C\" __global__ void scale() { no_such_thing(); }";
  const std::string message = message_of([&] { cuda::compile(wrong, 90); });
  EXPECT_NE(message.find("my_scale"), std::string::npos) << message;
  EXPECT_NE(message.find("no_such_thing"), std::string::npos) << message;
}

TEST_F(CudaSource, NeedsASourceAFunctionAndAGrid) {
  EXPECT_THROW(cuda::add_source_kernel({"nothing", "f", "", scale_grid, {}}), Error);
  EXPECT_THROW(cuda::add_source_kernel({"nothing", "", "x", scale_grid, {}}), Error);
  EXPECT_THROW(cuda::add_source_kernel({"nothing", "f", "x", {}, {}}), Error);
  EXPECT_FALSE(KernelRegistry::instance().has(Backend::kCuda, "nothing"));
}

TEST_F(CudaSource, TheCpuHasNoCompilerForIt) {
  EXPECT_THROW(Device::cpu().add_kernel(scale_kernel("cpu_scale")), Error);
}

struct CudaSourceRuns : CudaSource {
  void SetUp() override {
    CudaSource::SetUp();
    if (IsSkipped()) return;
    for (Device* each : Device::all()) {
      if (each->backend() == Backend::kCuda) device = each;
    }
    if (device == nullptr) GTEST_SKIP() << Device::absent().front().reason;
  }
  Device* device = nullptr;
};

TEST_F(CudaSourceRuns, BesideOursAndInGraphs) {
  const Kernel& kernel = device->add_kernel(scale_kernel("user_scale"));
  const auto encoder = device->make_encoder();
  std::vector<float> host(1000);
  for (std::size_t i = 0; i < host.size(); ++i) host[i] = static_cast<float>(i);
  const Tensor x = encoder->empty({1000}, DType::kF32);
  const Tensor y = encoder->zeros({1000}, DType::kF32);
  encoder->upload(host.data(), x.bytes(), x);
  encoder->dispatch(kernel, ScaleArgs{1000, 3}, {x}, {y});
  encoder->begin_capture();
  encoder->dispatch(kernel, ScaleArgs{1000, 2}, {y}, {y});
  const auto graph = encoder->end_capture();
  encoder->replay(*graph);
  encoder->replay(*graph);
  std::vector<float> got(1000);
  encoder->download(y, got.data(), y.bytes());
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], 12 * host[i]);
}

TEST_F(CudaSourceRuns, WhatItDoesNotTakeIsAnError) {
  const Kernel& kernel = device->add_kernel(scale_kernel("user_scale_checked"));
  const auto encoder = device->make_encoder();
  const Tensor x = encoder->zeros({8}, DType::kF32);
  EXPECT_THROW(encoder->dispatch(kernel, ScaleArgs{8, 1}, {x}, {}), Error);
  EXPECT_THROW(encoder->dispatch(kernel, ScaleArgs{8, 1}, {x, x}, {x}), Error);
  EXPECT_THROW(encoder->dispatch(kernel, std::int64_t{8}, {x}, {x}), Error);
  SourceKernel nameless = scale_kernel("user_nameless");
  nameless.entry = "no_such_entry";
  const Kernel& wrong = device->add_kernel(nameless);
  const std::string message =
      message_of([&] { encoder->dispatch(wrong, ScaleArgs{8, 1}, {x}, {x}); });
  EXPECT_NE(message.find("no_such_entry"), std::string::npos) << message;
  encoder->dispatch(kernel, ScaleArgs{8, 1}, {x}, {x});
  encoder->commit_and_wait();
}

TEST(CudaLibraries, SayTheirVersionOrWhyTheyAreAbsent) {
  for (const std::string& text :
       {cuda::cublaslt_version(), cuda::cudnn_version(), cuda::nvrtc_version()}) {
    EXPECT_TRUE(text.find("absent, ") == 0 || (text[0] >= '1' && text[0] <= '9')) << text;
    EXPECT_GT(text.size(), 3U);
  }
  const cuda::Library none("Nothing", {"libmlxtape-none.so.1"});
  EXPECT_FALSE(none.is_open());
  const std::string message = message_of([&] { none.function<void()>("f"); });
  EXPECT_NE(message.find("libmlxtape-none.so.1"), std::string::npos) << message;
}

}  // namespace
}  // namespace mlxtape
