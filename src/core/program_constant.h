// MT_CONSTANT int kMost = 64;  a number of a header that host and device share. MSL wants an address space for it.
#pragma once

#ifdef __METAL_VERSION__
#define MT_CONSTANT constant constexpr
#else
#define MT_CONSTANT constexpr
#endif
