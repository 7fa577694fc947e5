// Buffers. Each is mapped twice: the host's pointer and the GPU's address are the same memory at different places, so an
// address of the host that gets into a kernel is found. Around both lie pages that nobody may touch.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "backends/metal/emulator/metal_objects.h"

namespace mlxtape::emulator {
namespace {

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// The file's bytes between two pages without any rights; null where there is no room.
char* map_between_guards(int file, std::size_t bytes) {
  const std::size_t page = page_bytes();
  void* room = mmap(nullptr, bytes + 2 * page, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return nullptr;
  void* at = static_cast<char*>(room) + page;
  if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
    munmap(room, bytes + 2 * page);
    return nullptr;
  }
  return static_cast<char*>(at);
}

void unmap(char* at, std::size_t bytes) { munmap(at - page_bytes(), bytes + 2 * page_bytes()); }

}  // namespace

Buffer* make_buffer(std::size_t bytes) {
  const std::size_t page = page_bytes();
  const std::size_t mapped = (bytes + page - 1) / page * page;
  const int file = memfd_create("metal-buffer", MFD_CLOEXEC);
  if (file < 0) return nullptr;
  char* host = nullptr;
  char* gpu = nullptr;
  if (ftruncate(file, static_cast<off_t>(mapped)) == 0) {
    host = map_between_guards(file, mapped);
    gpu = host == nullptr ? nullptr : map_between_guards(file, mapped);
  }
  close(file);
  if (gpu == nullptr) {
    if (host != nullptr) unmap(host, mapped);
    return nullptr;
  }
  return new Buffer(host, gpu, bytes, mapped);
}

Buffer* make_buffer_on(void* pages, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(pages) % page_bytes() != 0 || bytes % page_bytes() != 0) {
    violation("newBufferWithBytesNoCopy: address and length must be multiples of a page");
  }
  auto* at = static_cast<char*>(pages);
  return new Buffer(at, at, bytes, 0);
}

Buffer::~Buffer() {
  if (mapped_bytes == 0) return;
  unmap(contents, mapped_bytes);
  unmap(block.base, mapped_bytes);
}

}  // namespace mlxtape::emulator
