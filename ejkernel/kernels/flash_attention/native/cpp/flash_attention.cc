// The handlers that XLA calls: flash attention forward and backward on CPU.
#include "backward.h"
#include "forward.h"

namespace ejkernel {
namespace {

// Below this many multiplications waking other threads takes longer than they save.
constexpr double WORTH_SHARING = 2e6;

long workers_for(const Call& call, const Problem& p) {
  const double products = double(p.batch) * p.heads * p.q_len * p.k_len * (p.dim + p.value_dim);
  return products < WORTH_SHARING ? 1 : call.threads();
}

XLA_FFI_Error* out_of_memory(const Call& call) {
  return call.error(XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
                    "flash_attention (native): no memory left for its blocks");
}

bool same(const Array& a, const Array& b) { return a.type == b.type && a.size() == b.size(); }

XLA_FFI_Error* forward(const Call& call) {
  if (!call.has(10, 2))
    return call.error(XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "flash_attention (native) takes 10 arrays and gives 2");
  Problem p;
  if (const char* wrong = p.read(call))
    return call.error(XLA_FFI_Error_Code_INVALID_ARGUMENT, wrong);

  Forward pass(p, p.block_q, p.block_k);
  pass.out = call.result(0), pass.lse = call.result(1);
  const long rows = p.batch * p.heads * p.q_len;
  if (pass.out.type != p.q.type || pass.out.size() != rows * p.value_dim ||
      pass.lse.type != Type::float32 || pass.lse.size() != rows)
    return call.error(XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "flash_attention (native): the results do not belong to q, k and v");
  const long workers = workers_for(call, p), each = Scratch::padded(pass.scratch_size());
  Scratch packed(pass.packed_size()), scratch(workers * each);
  if (packed.failed() || scratch.failed()) return out_of_memory(call);

  auto pack = [&](long item, long worker) {
    pass.pack(packed.begin(), scratch.begin() + worker * each, item);
  };
  auto attend = [&](long item, long worker) {
    pass.attend(packed.begin(), scratch.begin() + worker * each, item);
  };
  Queue::run(call, pass.packing_items(), workers, pack);
  Queue::run(call, pass.row_items(), workers, attend);
  return nullptr;
}

XLA_FFI_Error* backward(const Call& call) {
  if (!call.has(14, 4))
    return call.error(XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "flash_attention backward (native) takes 14 arrays and gives 4");
  Problem p;
  if (const char* wrong = p.read(call))
    return call.error(XLA_FFI_Error_Code_INVALID_ARGUMENT, wrong);

  const long workers = workers_for(call, p);
  Backward pass(p, p.block_q, p.block_k, workers);
  pass.out = call.argument(10), pass.dout = call.argument(11);
  pass.lse = Problem::optional<float>(call.argument(12));
  pass.dlse = Problem::optional<float>(call.argument(13));
  pass.dq = call.result(0), pass.dk = call.result(1), pass.dv = call.result(2);
  const long rows = p.batch * p.heads * p.q_len;
  if (!same(pass.dq, p.q) || !same(pass.dk, p.k) || !same(pass.dv, p.v) || !pass.out.size() ||
      !pass.dout.size() || !pass.lse || !Problem::fits(pass.out, p.q.type, rows * p.value_dim) ||
      !Problem::fits(pass.dout, p.q.type, rows * p.value_dim) ||
      !Problem::fits(call.argument(12), Type::float32, rows) ||
      !Problem::fits(call.argument(13), Type::float32, rows) ||
      (p.sinks && (call.result(3).type != Type::float32 || call.result(3).size() != rows)))
    return call.error(XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "flash_attention backward (native): results and gradients do not belong to "
                      "q, k and v");
  const bool needs_statistics = p.sinks || pass.has_large_scores();
  const long each = pass.scratch_size(), busy = least(workers, pass.parts());
  Scratch partial(pass.partial_size()), scratch(busy * each);
  Scratch statistics(needs_statistics ? pass.statistics_size() : 0);
  if (partial.failed() || scratch.failed() || statistics.failed()) return out_of_memory(call);

  if (needs_statistics) {
    pass.keep_statistics(statistics.begin());
    auto find = [&](long item, long worker) {
      pass.find_statistics(scratch.begin() + worker * each, item);
    };
    Queue::run(call, pass.statistics_items(), busy, find);
    if (p.sinks) pass.write_sink_gradients(static_cast<float*>(call.result(3).data));
  }
  auto differentiate = [&](long item, long worker) {
    pass.differentiate(scratch.begin() + worker * each, partial.begin(), item);
  };
  auto add_parts = [&](long item, long) { pass.add_parts(partial.begin(), item); };
  Queue::run(call, pass.parts(), busy, differentiate);
  Queue::run(call, pass.sums(), workers, add_parts);
  return nullptr;
}

}  // namespace
}  // namespace ejkernel

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* ejkernel_flash_attention_forward(
    XLA_FFI_CallFrame* frame) {
  ejkernel::Call call(frame);
  return call.answered_metadata() ? nullptr : ejkernel::forward(call);
}

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* ejkernel_flash_attention_backward(
    XLA_FFI_CallFrame* frame) {
  ejkernel::Call call(frame);
  return call.answered_metadata() ? nullptr : ejkernel::backward(call);
}
