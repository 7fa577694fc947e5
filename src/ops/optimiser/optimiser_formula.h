// The formulas of mlxtape/ops/optimiser.h for numbers of type V, a float or a vector of them. Included inside a
// backend's own namespace, which has root(V) and, as MT_STEP, how such functions are declared there.

template <class V>
struct AdamWRates {
  V keep;  // 1 − lr·decay
  V beta1, rest1, beta2, rest2;
  V rate;   // lr·c₁
  V scale;  // c₂
  V eps;
};

template <class V>
MT_STEP void adamw(const AdamWRates<V>& r, V g, V& w, V& m, V& v) {
  m = r.beta1 * m + r.rest1 * g;
  v = r.beta2 * v + r.rest2 * (g * g);
  w = w * r.keep - r.rate * m / (root(v) * r.scale + r.eps);
}

template <class V>
struct SgdRates {
  V lr, decay, momentum, rest;
};

template <class V>
MT_STEP void sgd(const SgdRates<V>& r, bool has_momentum, bool nesterov, V g, V& w, V& v) {
  g = g + r.decay * w;
  if (has_momentum) {
    v = r.momentum * v + r.rest * g;
    g = nesterov ? g + r.momentum * v : v;
  }
  w = w - r.lr * g;
}
