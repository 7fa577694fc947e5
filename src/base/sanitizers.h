// Which sanitizer a file is compiled with. g++ says so by a macro, Clang by a feature.
#pragma once

#if defined(__has_feature)
#define MT_HAS_FEATURE(x) __has_feature(x)
#else
#define MT_HAS_FEATURE(x) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || MT_HAS_FEATURE(address_sanitizer)
#define MT_ADDRESS_SANITIZER
#endif
#if defined(__SANITIZE_THREAD__) || MT_HAS_FEATURE(thread_sanitizer)
#define MT_THREAD_SANITIZER
#endif
