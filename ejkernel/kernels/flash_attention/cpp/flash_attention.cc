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

XLA_FFI_Error* forward(const Call& call) {
  if (!call.has(10, 2))
    return call.error(XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "flash_attention (native) takes 10 arrays and gives 2");
  Problem p;
  if (const char* wrong = p.read(call))
    return call.error(XLA_FFI_Error_Code_INVALID_ARGUMENT, wrong);
  p.sinks = Problem::optional<float>(call.argument(9));

  Forward pass(p, call.integer("block_q"), call.integer("block_k"));
  pass.out = call.result(0), pass.lse = call.result(1);
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
  if (!call.has(13, 3))
    return call.error(XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "flash_attention backward (native) takes 13 arrays and gives 3");
  Problem p;
  if (const char* wrong = p.read(call))
    return call.error(XLA_FFI_Error_Code_INVALID_ARGUMENT, wrong);

  const long workers = workers_for(call, p);
  Backward pass(p, call.integer("block_q"), call.integer("block_k"), workers);
  pass.out = call.argument(9), pass.dout = call.argument(10);
  pass.lse = Problem::optional<float>(call.argument(11));
  pass.dlse = Problem::optional<float>(call.argument(12));
  pass.dq = call.result(0), pass.dk = call.result(1), pass.dv = call.result(2);
  const long each = pass.scratch_size(), busy = least(workers, pass.parts());
  Scratch partial(pass.partial_size()), scratch(busy * each);
  if (partial.failed() || scratch.failed()) return out_of_memory(call);

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
