// A shared library that is opened when it is first needed, so that the program starts without it.
#pragma once

#include <initializer_list>
#include <string>

namespace mlxtape::cuda {

class Library {
 public:
  // Tries the file names in order. title: what people call it.
  Library(const char* title, std::initializer_list<const char*> files);

  bool is_open() const { return handle_ != nullptr; }
  const std::string& reason() const { return reason_; }  // why it is not open

  // Throws kBackend, saying what is missing, where the library or the function is not there.
  template <class Function>
  Function* function(const char* name) const {
    return reinterpret_cast<Function*>(symbol(name));
  }

 private:
  void* symbol(const char* name) const;

  const char* title_;
  void* handle_ = nullptr;
  std::string reason_;
};

// Opened on the first call, for good.
const Library& cublaslt();
const Library& cudnn();
const Library& nvrtc();

// "13.1.0", or "absent, " and why.
std::string cublaslt_version();
std::string cudnn_version();
std::string nvrtc_version();

}  // namespace mlxtape::cuda
