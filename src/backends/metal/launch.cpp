#include "backends/metal/launch.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <string>

#include "mlxtape/base/error.h"

namespace mlxtape::metal {

namespace {

// What an M1 does at least: bytes and operations per second.
constexpr double kBandwidth = 60e9;
constexpr double kSpeed = 1.5e12;

unsigned long checked_count(std::int64_t n) {
  if (n < 0 || n > std::numeric_limits<std::uint32_t>::max()) {
    throw Error(Errc::kBackend,
                "a launch must have 0 to 2^32 - 1 groups or threads along an axis, got " +
                    std::to_string(n));
  }
  return static_cast<unsigned long>(n);
}

}  // namespace

Launch::Launch(const KernelCall& call, const KernelName& name)
    : call_(call), target_(*static_cast<const Target*>(call.queue)) {
  key_.text = name.text;
  key_.base = name.base;
  key_.suffix = name.suffix;
  dispatch_.kernel = target_.kernel;
}

Launch::Launch(const KernelCall& call, const Pipeline& pipeline)
    : call_(call), target_(*static_cast<const Target*>(call.queue)) {
  dispatch_.kernel = target_.kernel;
  dispatch_.pipeline = &pipeline;
}

// ---- constants ----

Launch& Launch::add_constant(unsigned long index, ConstantType type, std::uint32_t bits) {
  if (dispatch_.pipeline != nullptr) {
    throw Error(Errc::kBackend, "constants must be given before the kernel is asked about, got " +
                                    std::to_string(index) + " later");
  }
  if (key_.constant_count == PipelineKey::kMostConstants) {
    throw Error(Errc::kBackend, "a kernel must have at most 8 function constants, got more");
  }
  key_.constants[key_.constant_count++] = {index, type, bits};
  return *this;
}
Launch& Launch::constant(unsigned long index, bool value) {
  return add_constant(index, ConstantType::kBool, value ? 1 : 0);
}
Launch& Launch::constant(unsigned long index, std::int32_t value) {
  return add_constant(index, ConstantType::kInt, static_cast<std::uint32_t>(value));
}
Launch& Launch::constant(unsigned long index, std::uint32_t value) {
  return add_constant(index, ConstantType::kUInt, value);
}
Launch& Launch::constant(unsigned long index, float value) {
  return add_constant(index, ConstantType::kFloat, std::bit_cast<std::uint32_t>(value));
}

// ---- memory ----

Block& Launch::block_of(const Range& range) const {
  Block* block = target_.machine->blocks.find(range);
  if (block == nullptr) {
    throw Error(Errc::kDevice,
                "every tensor must be in memory of the device, got one that is elsewhere");
  }
  return *block;
}

// A view may reach before the address of its first element.
void Launch::bind(unsigned long index, const void* address, const Range& range,
                  std::vector<Range>& touched) {
  if (address == nullptr) {
    dispatch_.buffers.push_back({nullptr, 0, index, 0, 0});
    return;
  }
  Block& block = block_of(range);
  const auto* at = static_cast<const char*>(address);
  dispatch_.buffers.push_back({&block, block.offset(at), index,
                               static_cast<unsigned long>(at - range.begin),
                               static_cast<unsigned long>(range.end - at)});
  touched.push_back(range);
}

Launch& Launch::buffers() {
  const std::size_t tensors = call_.in.size() + call_.out.size();
  if (tensors + 2 > kFirstGroupAt) {
    throw Error(Errc::kBackend,
                "a kernel must have at most 28 tensors as buffers, got " + std::to_string(tensors));
  }
  unsigned long index = 0;
  for (std::size_t i = 0; i < call_.in.size(); ++i) {
    bind(index++, call_.in[i], target_.in[i], dispatch_.reads);
  }
  for (std::size_t i = 0; i < call_.out.size(); ++i) {
    bind(index++, call_.out[i], target_.out[i], dispatch_.writes);
  }
  if (call_.args_bytes != 0) raw_bytes(index, call_.args, call_.args_bytes);
  ++index;
  if (call_.workspace != nullptr) {
    bind(index, call_.workspace, target_.workspace, dispatch_.writes);
  }
  return *this;
}

// Of the tensor or the workspace that has this address.
Range Launch::range_of(const void* address) const {
  const auto* wanted = static_cast<const char*>(address);
  if (wanted == nullptr) return {};
  const Range one{wanted, wanted + 1};
  for (const auto* list : {&target_.in, &target_.out}) {
    for (const Range& range : *list) {
      if (range.holds(one)) return range;
    }
  }
  if (target_.workspace.holds(one)) return target_.workspace;
  throw Error(Errc::kBackend,
              "a launch must use the call's tensors or its workspace, got another address");
}

Launch& Launch::input(unsigned long index, const void* address) {
  bind(index, address, range_of(address), dispatch_.reads);
  return *this;
}
Launch& Launch::output(unsigned long index, const void* address) {
  bind(index, address, range_of(address), dispatch_.writes);
  return *this;
}

Launch& Launch::raw_bytes(unsigned long index, const void* value, std::size_t size) {
  if (size > kMostBytes) {
    throw Error(Errc::kBackend,
                "arguments must have at most 4096 bytes, got " + std::to_string(size));
  }
  const auto* first = static_cast<const std::byte*>(value);
  dispatch_.bytes.push_back({index, {first, first + size}});
  return *this;
}

Launch& Launch::table(unsigned long index, std::size_t size, std::span<void* const> inputs,
                      std::span<void* const> outputs) {
  if (inputs.size() + outputs.size() > size) {
    throw Error(Errc::kBackend, "a table must have room for all tensors, got " +
                                    std::to_string(inputs.size() + outputs.size()) + " for " +
                                    std::to_string(size));
  }
  std::vector<unsigned long long> addresses;
  const auto add = [&](const void* address, std::vector<Range>& touched) {
    if (address == nullptr) {
      addresses.push_back(0);
      return;
    }
    const Range range = range_of(address);
    Block& block = block_of(range);
    addresses.push_back(block.gpu + (block.offset(address) - block.start));
    auto& tables = dispatch_.tables;
    if (std::find(tables.begin(), tables.end(), &block) == tables.end()) tables.push_back(&block);
    touched.push_back(range);
  };
  for (const void* address : inputs) add(address, dispatch_.reads);
  for (const void* address : outputs) add(address, dispatch_.writes);
  addresses.resize(size);
  return raw_bytes(index, addresses.data(), addresses.size() * sizeof addresses[0]);
}

// ---- extent and cost ----

Launch& Launch::group_memory(std::int64_t bytes) {
  dispatch_.group_memory = (checked_count(bytes) + 15) / 16 * 16;
  return *this;
}
Launch& Launch::groups(std::int64_t x, std::int64_t y, std::int64_t z) {
  dispatch_.groups = {checked_count(x), checked_count(y), checked_count(z)};
  is_empty_ = x == 0 || y == 0 || z == 0;
  return *this;
}
Launch& Launch::threads(std::int64_t x, std::int64_t y, std::int64_t z) {
  dispatch_.threads = {checked_count(x), checked_count(y), checked_count(z)};
  return *this;
}
Launch& Launch::in_parts() {
  dispatch_.takes_first_group = true;
  return *this;
}
Launch& Launch::operations(double count) {
  operations_ = count;
  return *this;
}
Launch& Launch::traffic(double bytes) {
  traffic_ = bytes;
  return *this;
}

const Pipeline& Launch::pipeline() {
  if (dispatch_.pipeline == nullptr) {
    dispatch_.pipeline = &target_.machine->library.pipeline(key_);
  }
  return *dispatch_.pipeline;
}
std::int64_t Launch::most_threads() { return static_cast<std::int64_t>(pipeline().max_threads); }

void Launch::run() {
  if (is_empty_) return;
  const Pipeline& compiled = pipeline();
  const Size& threads = dispatch_.threads;
  if (threads.width * threads.height * threads.depth > compiled.max_threads) {
    throw Error(Errc::kBackend, compiled.name + " must be launched with at most " +
                                    std::to_string(compiled.max_threads) +
                                    " threads a group, got " +
                                    std::to_string(threads.width * threads.height * threads.depth));
  }
  if (traffic_ < 0) {
    traffic_ = 0;
    for (const auto* list : {&dispatch_.reads, &dispatch_.writes}) {
      for (const Range& range : *list) traffic_ += static_cast<double>(range.end - range.begin);
    }
  }
  dispatch_.seconds = traffic_ / kBandwidth + operations_ / kSpeed;
  if (target_.recording != nullptr) {
    target_.recording->push_back(std::move(dispatch_));
  } else {
    target_.machine->stream.add(dispatch_);
  }
}

}  // namespace mlxtape::metal
