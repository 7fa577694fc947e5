#include "mlxtape/core/encoder.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>
#include <vector>

#include "mlxtape/ops/softmax.h"

namespace mlxtape {
namespace {

struct ScaleArgs {
  float by;
  std::int64_t n;
};

// A kernel as a user would write it, registered beside ours.
void scale(const KernelCall& call) {
  const auto& args = call.as<ScaleArgs>();
  for (std::int64_t i = 0; i < args.n; ++i) {
    call.output<float>(0)[i] = args.by * call.input<float>(0)[i];
  }
}

void count_scratch(const KernelCall& call) {
  auto* scratch = static_cast<std::int64_t*>(call.workspace);
  *scratch = *static_cast<const std::int64_t*>(call.state);
  *call.output<std::int64_t>(0) = *scratch;
}

void broken(const KernelCall&) { throw std::runtime_error("it is broken"); }

const Kernel& user_kernel() {
  static const Kernel* const kKernel = [] {
    KernelRegistry::instance().add(Backend::kCpu, "user_scale_f32", scale);
    return &KernelRegistry::instance().find(Backend::kCpu, "user_scale_f32");
  }();
  return *kKernel;
}

struct Encoder : testing::Test {
  std::unique_ptr<CommandEncoder> encoder = Device::cpu().make_encoder();

  Tensor filled(std::int64_t n, float value) {
    const Tensor t = encoder->empty({n}, DType::kF32);
    for (float& v : t.host<float>()) v = value;
    return t;
  }
};

TEST_F(Encoder, RunsUserKernelsInOrderAndCounts) {
  const Tensor a = filled(5, 3);
  const Tensor b = encoder->empty_like(a);
  const Tensor c = encoder->empty_like(a);
  encoder->dispatch(user_kernel(), ScaleArgs{2, 5}, {a}, {b});
  encoder->dispatch(user_kernel(), ScaleArgs{10, 5}, {b}, {c});
  encoder->commit();
  encoder->commit_and_wait();
  EXPECT_EQ(c.host<float>()[4], 60);
  const EncoderCounters counters = encoder->counters();
  EXPECT_EQ(counters.dispatches, 2);
  EXPECT_EQ(counters.commits, 2);
  EXPECT_EQ(counters.waits, 1);
}

TEST_F(Encoder, WorkspaceAndStateReachTheKernel) {
  static const std::int64_t kState = 77;
  KernelRegistry& registry = KernelRegistry::instance();
  if (!registry.has(Backend::kCpu, "user_scratch")) {
    registry.add(
        Backend::kCpu, "user_scratch", count_scratch,
        [](const void*) { return sizeof(std::int64_t); }, &kState);
  }
  const Tensor out = encoder->zeros({1}, DType::kI64);
  encoder->dispatch(registry.find(Backend::kCpu, "user_scratch"), 0, {}, {out});
  EXPECT_EQ(out.host<std::int64_t>()[0], 77);
}

TEST_F(Encoder, AFailingKernelIsNamedAndTheEncoderGoesOn) {
  KernelRegistry& registry = KernelRegistry::instance();
  if (!registry.has(Backend::kCpu, "user_broken")) {
    registry.add(Backend::kCpu, "user_broken", broken);
  }
  try {
    encoder->dispatch(registry.find(Backend::kCpu, "user_broken"), 0, {}, {});
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::kBackend);
    EXPECT_NE(std::string(e.what()).find("user_broken"), std::string::npos);
    EXPECT_NE(std::string(e.what()).find("it is broken"), std::string::npos);
  }
  const Tensor a = filled(5, 3);
  EXPECT_NO_THROW(ops::softmax(*encoder, a));
}

TEST_F(Encoder, WhateverAKernelDoesIsAnErrorWithItsName) {
  KernelRegistry& registry = KernelRegistry::instance();
  registry.add(Backend::kCpu, "user_throws_int", [](const KernelCall&) { throw 42; });
  registry.add(
      Backend::kCpu, "user_bad_workspace", [](const KernelCall&) {},
      [](const void*) -> std::size_t { throw 42; });
  registry.add(
      Backend::kCpu, "user_calls_back",
      [](const KernelCall& call) {
        const_cast<CommandEncoder*>(static_cast<const CommandEncoder*>(call.state))->commit();
      },
      nullptr, encoder.get());
  const Tensor a = filled(5, 3);
  for (const char* name : {"user_throws_int", "user_bad_workspace", "user_calls_back"}) {
    try {
      encoder->dispatch(registry.find(Backend::kCpu, name), 0, {a}, {a});
      ADD_FAILURE() << name;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(name), std::string::npos) << e.what();
    }
  }
  const std::vector<TensorRef> many(384, a), one{a};
  EXPECT_THROW(encoder->dispatch(user_kernel(), ScaleArgs{2, 5}, many, one), Error);
  EXPECT_NO_THROW(encoder->dispatch(user_kernel(), ScaleArgs{2, 5}, {a}, {a}));
}

TEST_F(Encoder, ATensorWithoutMemoryIsRefused) {
  const Tensor a = filled(4, 1);
  const Tensor meta = Tensor::meta({4});
  EXPECT_THROW(encoder->dispatch(user_kernel(), ScaleArgs{2, 4}, {meta}, {a}), Error);
  EXPECT_THROW(ops::softmax(*encoder, Tensor::meta({4})), Error);
}

TEST_F(Encoder, OutOfMemoryLeavesTheDeviceUsable) {
  const Tensor x = filled(1 << 16, 1);
  Device::cpu().memory().trim();
  Device::cpu().memory().set_limit(Device::cpu().memory().stats().current + 1000);
  EXPECT_THROW(ops::softmax(*encoder, x), Error);
  Device::cpu().memory().set_limit(0);
  const Tensor y = ops::softmax(*encoder, x);
  EXPECT_FLOAT_EQ(y.host<float>()[0], 1.0F / (1 << 16));
}

TEST_F(Encoder, TransfersAreChecked) {
  const Tensor t = encoder->zeros({4}, DType::kF32);
  const float values[4] = {1, 2, 3, 4};
  float back[4] = {};
  encoder->upload(values, sizeof values, t);
  encoder->download(t, back, sizeof back);
  EXPECT_EQ(back[3], 4);
  EXPECT_THROW(encoder->upload(values, 8, t), Error);
  EXPECT_THROW(encoder->download(t.slice(0, 0, 4, 2), back, 8), Error);
}

TEST_F(Encoder, TraceIsChromeJson) {
  const auto trace = std::make_shared<Trace>();
  encoder->set_trace(trace);
  ops::softmax(*encoder, filled(100, 1));
  encoder->set_trace(nullptr);
  ops::softmax(*encoder, filled(100, 1));
  EXPECT_EQ(trace->size(), 1);
  trace->add("a \"quoted\"\n name", "track", Trace::Clock::now(), Trace::Clock::now());
  const std::string path = testing::TempDir() + "mlxtape_trace.json";
  trace->write(path);
  std::ifstream file(path);
  const auto json = nlohmann::json::parse(file);
  ASSERT_EQ(json["traceEvents"].size(), 2);
  const auto& event = json["traceEvents"][0];
  EXPECT_EQ(event["name"], "softmax_fwd_f32");
  EXPECT_EQ(event["cat"], "cpu");
  EXPECT_EQ(event["ph"], "X");
  EXPECT_GE(event["dur"].get<double>(), 0);
  EXPECT_EQ(json["traceEvents"][1]["name"], "a \"quoted\"\n name");
  std::remove(path.c_str());
  EXPECT_THROW(trace->write("/no/such/folder/trace.json"), Error);
}

TEST_F(Encoder, WithoutLaunchingNothingIsComputed) {
  const Tensor a = filled(4, 1);
  const Tensor b = filled(4, 7);
  encoder->set_launching(false);
  encoder->dispatch(user_kernel(), ScaleArgs{2, 4}, {a}, {b});
  encoder->set_launching(true);
  EXPECT_EQ(b.host<float>()[0], 7);
}

TEST_F(Encoder, OneEncoderOnManyThreads) {
  std::vector<std::thread> users;
  for (int u = 0; u < 4; ++u) {
    users.emplace_back([&, u] {
      const Tensor x = filled(300, static_cast<float>(u));
      for (int i = 0; i < 100; ++i) {
        const Tensor y = ops::softmax(*encoder, x);
        ASSERT_FLOAT_EQ(y.host<float>()[299], 1.0F / 300);
      }
    });
  }
  for (std::thread& user : users) user.join();
  EXPECT_EQ(encoder->counters().dispatches, 400);
}

TEST(EncoderTest, ManyEncodersOnManyThreads) {
  std::vector<std::thread> users;
  for (int u = 0; u < 4; ++u) {
    users.emplace_back([] {
      const auto encoder = Device::cpu().make_encoder();
      const Tensor x = encoder->zeros({64, 512}, DType::kF32);
      for (int i = 0; i < 50; ++i) {
        const Tensor y = ops::softmax(*encoder, x);
        ASSERT_FLOAT_EQ(y.host<float>()[64 * 512 - 1], 1.0F / 512);
      }
    });
  }
  for (std::thread& user : users) user.join();
}

TEST(Registry, RefusesWhatMakesNoSense) {
  KernelRegistry registry;
  registry.add(Backend::kCpu, "one", scale);
  EXPECT_THROW(registry.add(Backend::kCpu, "one", scale), Error);
  EXPECT_NO_THROW(registry.add(Backend::kCuda, "one", scale));
  EXPECT_THROW(registry.add(Backend::kCpu, "", scale), Error);
  EXPECT_THROW(registry.add(Backend::kCpu, "null", nullptr), Error);
  try {
    registry.find(Backend::kMetal, "softmax_fwd_f32");
    FAIL() << "found";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::kNoKernel);
    EXPECT_NE(std::string(e.what()).find("softmax_fwd_f32"), std::string::npos);
  }
  EXPECT_EQ(registry.names(Backend::kCpu), std::vector<std::string>{"one"});
}

TEST(Registry, LooksUpAndAddsOnManyThreads) {
  KernelRegistry registry;
  std::vector<std::thread> users;
  for (int u = 0; u < 4; ++u) {
    users.emplace_back([&, u] {
      for (int i = 0; i < 100; ++i) {
        const std::string name = "k" + std::to_string(u) + "_" + std::to_string(i);
        registry.add(Backend::kCpu, name, scale);
        ASSERT_EQ(registry.find(Backend::kCpu, name).name, name);
      }
    });
  }
  for (std::thread& user : users) user.join();
  EXPECT_EQ(registry.names(Backend::kCpu).size(), 400);
}

TEST(Device, TheCpuIsAlwaysThere) {
  ASSERT_FALSE(Device::all().empty());
  EXPECT_EQ(Device::cpu().backend(), Backend::kCpu);
  EXPECT_GT(Device::cpu().limits().memory_bytes, 0);
  EXPECT_EQ(Device::cpu().name().rfind("cpu: ", 0), 0);
  EXPECT_EQ(&Device::find(Backend::kCpu), &Device::cpu());
  // Every backend is here, or there is a reason why not.
  EXPECT_GE(Device::all().size() + Device::absent().size(), kBackendCount);
  for (const AbsentDevice& absent : Device::absent()) {
    try {
      Device::find(absent.backend);
      FAIL() << "found";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::kDevice);
      const std::string says = std::string(name_of(absent.backend)) + " must exist";
      EXPECT_NE(std::string(e.what()).find(says), std::string::npos);
      EXPECT_NE(std::string(e.what()).find(absent.reason), std::string::npos);
    }
  }
  EXPECT_THROW(Device::cpu().allocate(0), Error);
}

}  // namespace
}  // namespace mlxtape
