// The tool that turns a .metal file into one text, and that text into C++: what it refuses, which line it names, and what
// it makes of the rest. That the C++ does what the text says is shown by the kernels that run.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "backends/metal/emulator/bind/kernels.h"
#include "backends/metal/emulator/bind/text.h"
#include "backends/metal/emulator/bind/tokens.h"

namespace mlxtape::metal_bind {
namespace {

// The sentence with which a text is refused; empty: it is not.
std::string refusal_of(const std::string& text) {
  try {
    bind_kernels("x", "# 1 \"x.metal\"\n" + text, 0);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}
std::string in_kernel(const std::string& statement) {
  return "kernel void f(device float* x [[buffer(0)]]) {\n" + statement + "\n}\n";
}

TEST(MetalBind, RefusesWhatTheLanguageHasNot) {
  const struct {
    std::string text;
    const char* says;
  } rows[] = {
      {in_kernel("x[0] = double(1);"), "x.metal:2: Metal has no double"},
      {in_kernel("goto end; end:;"), "x.metal:2: Metal has no goto"},
      {in_kernel("x = new float;"), "x.metal:2: Metal has no new"},
      {in_kernel("x[0] = std::max(1.0f, 2.0f);"), "x.metal:2: Metal has no std::"},
      {in_kernel("static int n = 0;"), "x.metal:2: a static variable in a function"},
      {in_kernel("if (x[0] > 0) { threadgroup float room[4]; }"),
       "x.metal:2: a threadgroup variable must be in the outermost block"},
      {in_kernel("threadgroup float one = 1;"),
       "x.metal:2: a threadgroup variable has no initial value"},
      {"void g() { threadgroup float one; }\n" + in_kernel(""),
       "x.metal:1: a threadgroup variable must be in the outermost block"},
      {"threadgroup float one;\n" + in_kernel(""), "x.metal:1: a threadgroup variable must be"},
      {in_kernel("float* p = nullptr;"),
       "x.metal:2: a pointer or reference without an address space"},
      {in_kernel("const float& p = x[0];"),
       "x.metal:2: a pointer or reference without an address space"},
      {in_kernel("vec<float, 4>* p = 0;"),
       "x.metal:2: a pointer or reference without an address space"},
      {"float g(const float* p) { return *p; }\n" + in_kernel(""),
       "x.metal:1: a pointer or reference without an address space"},
      {"struct S {\n  float* p;\n};\n" + in_kernel(""),
       "x.metal:2: a pointer or reference without an address space"},
      {"template <typename T>\nT g(T& p) { return p; }\n" + in_kernel(""),
       "x.metal:2: a pointer or reference without an address space"},
      {"kernel void f(device float* x) {}",
       "x.metal:1: a parameter of a kernel without an attribute"},
      {"kernel void f(device float* x [[buffer(0)]], uint i) {}",
       "x.metal:1: a parameter of a kernel without an attribute"},
      {"kernel void f(device float* x [[buffer(0)]], uint i [[thread_in_space]]) {}",
       "does not know: thread_in_space"},
      {"kernel void f(device float* x [[buffer(0), function_constant(y)]]) {}",
       "'y' is no function constant"},
      {"kernel float f(device float* x [[buffer(0)]]) {}", "x.metal:1: a kernel returns void"},
      {in_kernel("") + in_kernel(""), "x.metal:4: kernel f is there twice"},
      {"template [[host_name(\"a\")]] [[kernel]] decltype(g<float>) g<float>;",
       "\"a\" is made from 'g', no kernel"},
      {"template [[kernel]] decltype(g<float>) g<float>;", "an instantiation without host_name"},
      {"float g(float x) { return x; }", "x.metal: no kernel"},
      {"constant bool a [[function_constant(0)]];\nconstant bool b = !a;\n" + in_kernel(""),
       "x.metal:2: a constant made from a function constant"},
      {"constant int a [[function_constant(0)]] = 3;\n" + in_kernel(""),
       "x.metal:1: a function constant has no other value"},
      {"kernel void f(device float* x", "x.metal:1: '(' is not closed"},
  };
  for (const auto& row : rows) {
    const std::string said = refusal_of(row.text);
    EXPECT_NE(said.find(row.says), std::string::npos) << row.text << "\nsays: " << said;
  }
}

TEST(MetalBind, TakesWhatTheLanguageHas) {
  for (const std::string statement :
       {"thread float* p = &y; x[0] = *p;", "device const float4* p = (device const float4*)x;",
        "threadgroup float a[2], b;", "const device float& r = x[1];", "x[0] = x[1] * x[2];",
        "int a = 3; a & 1 ? a : 2;", "constexpr int n = 4; float v[n];",
        "for (uint i = 0; i < 3; ++i) x[i] += 1;", "static constexpr constant int n = 1;",
        "uint a[2], b = a[a[0]];"}) {
    EXPECT_EQ(refusal_of(in_kernel(statement)), "") << statement;
  }
  EXPECT_EQ(refusal_of("template <typename T, int N = (2 > 1)>\nT g(thread T& a, T b = T(3), int c "
                       "= 2) { return a; }\n" +
                       in_kernel("")),
            "");
  EXPECT_EQ(refusal_of("namespace n { struct S { float a; S(float b) : a(b) {} float get() const "
                       "thread { return a; } }; }\n" +
                       in_kernel("")),
            "");
}

std::string bound(const std::string& text) { return bind_kernels("x", text, 7); }
bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(MetalBind, RewritesOnlyWhatDiffers) {
  EXPECT_TRUE(has(bound(in_kernel("x[0] = 1.5 + 2.f + 3 + 4e-3 + 0x1p-2 + 0x1e + 5.0h + 6bf;")),
                  "x[0] = float(1.5f) + float(2.f) + 3 + float(4e-3f) + float(0x1p-2f) + 0x1e + "
                  "half(5.0f) + bfloat(6f);"));
  EXPECT_TRUE(has(bound(in_kernel("b.zx = a.xyz.xy; s.xylo = 1;")),
                  "b.template places<2, 0>() = a.template swizzle<0, 1, 2>().template swizzle<0, "
                  "1>(); s.xylo = 1;"));
  EXPECT_TRUE(has(bound("constant float table[2] = {1, 2};\n" + in_kernel("")),
                  "const float table[2] = {1, 2};"));
  EXPECT_TRUE(has(bound("[[kernel, max_total_threads_per_threadgroup(96)]] void f(device float* x "
                        "[[buffer(3)]]) {}"),
                  "info(\"f\", 96)"));
  const std::string two = bound(
      "template <typename T> [[kernel]] void f(device T* x [[buffer(0)]]) {}\n"
      "template [[host_name(\"f_\" \"a\")]] [[kernel]] decltype(f<float>) f<float>;\n"
      "template [[host_name(\"f_b\")]] [[kernel]] decltype(f<half>) f<half>;\n");
  EXPECT_TRUE(has(two, "Call<& f<float>") || has(two, "Call<&f<float>")) << two;
  EXPECT_TRUE(has(two, "info(\"f_\"\"a\", 0)"));
  EXPECT_TRUE(has(two, "info(\"f_b\", 0)"));
}

// ---- one text of several files ----

class MetalText : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("metal_text_" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_ / "src" / "shared");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
  }
  FlatText flat(const std::string& name) const {
    return flatten((folder_ / name).string(), {folder_.string(), {(folder_ / "src").string()}});
  }
  std::string refused(const std::string& name) const {
    try {
      flat(name);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }

 private:
  std::filesystem::path folder_;
};

TEST_F(MetalText, TakesFilesInOnceAndCutsTheHostsHalf) {
  write("src/shared/rows.h", "#pragma once\n#include \"shared/more.h\"\nint rows;  // how many\n");
  write("src/shared/more.h",
        "#ifndef __METAL_VERSION__\n#include <cstdint>\n#endif\n#if N == 1\nint more;\n#endif\n");
  write("x.metal",
        "#include \"shared/rows.h\"\n#include \"shared/more.h\"\n#ifdef "
        "__METAL_VERSION__\n#include <metal_stdlib>\n"
        "kernel void f();\n#else\n#include \"backends/metal/launch.h\"\n#if HOST\nint "
        "host;\n#endif\n#endif\n");
  const FlatText text = flat("x.metal");
  EXPECT_EQ(text.text,
            "#line 1 \"x.metal\"\n#line 1 \"src/shared/rows.h\"\n\n#line 1 "
            "\"src/shared/more.h\"\n\n\n\n#if N == 1\nint more;\n#endif\n"
            "#line 3 \"src/shared/rows.h\"\nint rows;\n#line 2 \"x.metal\"\n\n\n#include "
            "<metal_stdlib>\nkernel void f();\n");
  EXPECT_EQ(text.files.size(), 3U);
  EXPECT_EQ(
      embedded("x", "a \"b\\n\"\n").find("    \"a \\\"b\\\\n\\\"\\n\"\n") == std::string::npos,
      false);
}

TEST_F(MetalText, RefusesWhatAMacCouldNotRead) {
  write("cstdint.metal", "\n#include <cstdint>\n");
  EXPECT_EQ(refused("cstdint.metal"), "cstdint.metal:2: Metal has no <cstdint>");
  write("absent.metal", "#include \"absent.h\"\n");
  EXPECT_EQ(refused("absent.metal"), "absent.metal:1: \"absent.h\" is not found");
  write("src/shared/rows.h", "");
  write("condition.metal", "#if N\n#include \"shared/rows.h\"\n#endif\n");
  EXPECT_EQ(refused("condition.metal"), "condition.metal:2: an #include under a condition");
  write("open.metal", "#ifdef __METAL_VERSION__\n");
  EXPECT_EQ(refused("open.metal"), "open.metal: a condition is not closed");
  write("else.metal", "#else\n");
  EXPECT_EQ(refused("else.metal"), "else.metal:1: #else without a condition");
  write("elif.metal", "#ifdef __METAL_VERSION__\n#elif N\n#endif\n");
  EXPECT_EQ(refused("elif.metal"), "elif.metal:2: #elif of a test for __METAL_VERSION__");
}

}  // namespace
}  // namespace mlxtape::metal_bind
