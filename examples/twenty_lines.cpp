// RMSNorm of two rows and its gradient: the program of the README.
#include <mlxtape/mlxtape.h>

#include <cstdio>

int main() try {
  using namespace mlxtape;
  Device& device = Device::cpu();
  const auto encoder = device.make_encoder();

  float values[] = {1, 2, 3, 4, 5, 6, 7, 8};
  const Tensor x = Tensor::wrap(values, {2, 4});  // used in place, nothing copied
  const Tensor w = device.zeros({4}, DType::kF32);
  for (float& v : w.host<float>()) v = 1;

  const auto [y, r] = ops::rms_norm(*encoder, x, w, 1e-6F);
  const auto [dx, dw] = ops::rms_norm_backward(*encoder, x, w, r, y);  // the gradient of ½Σy²
  encoder->commit_and_wait();

  for (const float v : y.host<float>()) std::printf("%.4f ", v);
  std::printf("\ndw: ");
  for (const float v : dw.host<float>()) std::printf("%.4f ", v);
  std::printf("\n");
} catch (const mlxtape::Error& e) {
  std::fprintf(stderr, "%s\n", e.what());  // one sentence: what is required, what was given
  return 1;
}
