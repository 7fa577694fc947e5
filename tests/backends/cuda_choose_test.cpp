#include "backends/cuda/choose.h"

#include <gtest/gtest.h>

namespace mlxtape::test {
namespace {

using cuda::choose_gpus;
using cuda::GpuFacts;

const GpuFacts kNew{"NVIDIA H200", "", 9, 0, 227 * 1024};
const GpuFacts kNewer{"NVIDIA B200", "", 10, 0, 227 * 1024};
const GpuFacts kOld{"Tesla T4", "", 7, 5, 64 * 1024};
const GpuFacts kSmall{"RTX 5090", "", 12, 0, 99 * 1024};
const GpuFacts kLost{"", "unknown error", 0, 0, 0};

const char* const kWhyOld =
    "Tesla T4 has compute capability 7.5 and 64 KiB of shared memory for a block; the kernels need "
    "9.0 and 227 KiB";

TEST(CudaChoice, WhatCanBeUsedIsUsedWhateverElseIsThere) {
  EXPECT_EQ(choose_gpus({kNew, kNewer}).usable, (std::vector<int>{0, 1}));
  EXPECT_EQ(choose_gpus({kNew, kNewer}).others, "");
  // In either order.
  EXPECT_EQ(choose_gpus({kNew, kOld}).usable, std::vector<int>{0});
  EXPECT_EQ(choose_gpus({kNew, kOld}).others, std::string("cuda:1: ") + kWhyOld);
  EXPECT_EQ(choose_gpus({kOld, kNew}).usable, std::vector<int>{1});
  EXPECT_EQ(choose_gpus({kOld, kNew}).others, std::string("cuda:0: ") + kWhyOld);
}

TEST(CudaChoice, EveryOtherIsNamed) {
  const auto choice = choose_gpus({kOld, kLost, kSmall});
  EXPECT_TRUE(choice.usable.empty());
  EXPECT_EQ(choice.others,
            std::string("cuda:0: ") + kWhyOld +
                "; cuda:1 does not answer: unknown error; cuda:2: RTX 5090 has compute capability "
                "12.0 and 99 KiB of shared memory for a block; the kernels need 9.0 and 227 KiB");
  EXPECT_TRUE(choose_gpus({}).usable.empty());
  EXPECT_EQ(choose_gpus({}).others, "");
}

TEST(CudaChoice, NamesTheVersionsOfDriverAndBuild) {
  EXPECT_EQ(cuda::driver_reason(0, 13000), "no NVIDIA driver");
  EXPECT_EQ(cuda::driver_reason(11040, 12080),
            "the NVIDIA driver supports CUDA 11.4, and this build needs CUDA 12: a newer driver is "
            "needed");
  EXPECT_EQ(cuda::driver_reason(12080, 13000),
            "the NVIDIA driver supports CUDA 12.8, and this build needs CUDA 13: a newer driver is "
            "needed");
}

}  // namespace
}  // namespace mlxtape::test
