// The formulas of mlxtape/ops/optimiser.h for numbers of type V, a float or a vector of them: a rule is made of a step's
// arguments, and applied to a gradient, its weight and its states. Included inside a backend's own namespace, which has
// root(V), sign(V), all<V>(float) and, as MT_STEP, how such functions are declared there; where memory has address spaces,
// MT_OWN is that of a thread's numbers and MT_GIVEN that of arguments.
#ifndef MT_OWN
#define MT_OWN
#define MT_GIVEN
#endif

template <class V>
struct AdamWRule {
  enum { kStates = 2 };  // m, v
  V keep;                // 1 − lr·decay
  V beta1, rest1, beta2, rest2;
  V rate;   // lr·c₁
  V scale;  // c₂
  V eps;

  MT_STEP AdamWRule(MT_GIVEN const OptimiserArgs& a, float lr, float t) {
    const bool corrects = a.bias_correction != 0;
    const float c1 = corrects ? -1 / expm1f(t * a.log_beta1) : 1;
    const float c2 = corrects ? 1 / sqrtf(-expm1f(t * a.log_beta2)) : 1;
    keep = all<V>(1 - lr * a.weight_decay);
    beta1 = all<V>(a.beta1);
    rest1 = all<V>(a.rest1);
    beta2 = all<V>(a.beta2);
    rest2 = all<V>(a.rest2);
    rate = all<V>(lr * c1);
    scale = all<V>(c2);
    eps = all<V>(a.eps);
  }
  MT_STEP void operator()(V g, MT_OWN V& w, MT_OWN V* states) const {
    MT_OWN V &m = states[0], &v = states[1];
    m = beta1 * m + rest1 * g;
    v = beta2 * v + rest2 * (g * g);
    w = w * keep - rate * m / (root(v) * scale + eps);
  }
};

template <class V>
struct SgdRule {
  enum { kStates = 1 };  // v
  V lr, decay, momentum, rest;
  bool has_momentum, nesterov;

  MT_STEP SgdRule(MT_GIVEN const OptimiserArgs& a, float rate, float) {
    has_momentum = a.has_momentum != 0;
    nesterov = a.nesterov != 0;
    lr = all<V>(rate);
    decay = all<V>(a.weight_decay);
    momentum = all<V>(a.beta1);
    rest = all<V>(a.rest1);
  }
  MT_STEP void operator()(V g, MT_OWN V& w, MT_OWN V* states) const {
    MT_OWN V& v = states[0];
    g = g + decay * w;
    if (has_momentum) {
      v = momentum * v + rest * g;
      g = nesterov ? g + momentum * v : v;
    }
    w = w - lr * g;
  }
};

template <class V>
struct LionRule {
  enum { kStates = 1 };  // m
  V keep, lr, beta1, rest1, beta2, rest2;

  MT_STEP LionRule(MT_GIVEN const OptimiserArgs& a, float rate, float) {
    keep = all<V>(1 - rate * a.weight_decay);
    lr = all<V>(rate);
    beta1 = all<V>(a.beta1);
    rest1 = all<V>(a.rest1);
    beta2 = all<V>(a.beta2);
    rest2 = all<V>(a.rest2);
  }
  MT_STEP void operator()(V g, MT_OWN V& w, MT_OWN V* states) const {
    MT_OWN V& m = states[0];
    const V c = beta1 * m + rest1 * g;
    m = beta2 * m + rest2 * g;
    w = w * keep - lr * sign(c);
  }
};

// Of muon what comes before its matrices: the weight stays.
template <class V>
struct MuonRule {
  enum { kStates = 2 };  // v, u
  V decay, momentum, rest;
  bool nesterov;

  MT_STEP MuonRule(MT_GIVEN const OptimiserArgs& a, float, float) {
    nesterov = a.nesterov != 0;
    decay = all<V>(a.weight_decay);
    momentum = all<V>(a.beta1);
    rest = all<V>(a.rest1);
  }
  MT_STEP void operator()(V g, MT_OWN V& w, MT_OWN V* states) const {
    MT_OWN V &v = states[0], &u = states[1];
    g = g + decay * w;
    v = momentum * v + rest * g;
    u = nesterov ? rest * g + momentum * v : v;
  }
};
