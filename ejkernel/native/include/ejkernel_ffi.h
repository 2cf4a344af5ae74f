// What a handler needs of XLA's foreign function interface: its C API alone.
//
// The C++ wrapper (ffi.h) would do the same, but makes a build ten times longer. Names that differ
// between versions of the header are avoided.
#ifndef EJKERNEL_FFI_H_
#define EJKERNEL_FFI_H_

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "xla/ffi/api/c_api.h"

namespace ejkernel {

enum class Type { float32, bfloat16, float16, int8, float8_e4m3, float8_e5m2, int32, boolean, other };

struct Array {
  Type type;
  void* data;
  long rank;
  const int64_t* dims;

  // A dimension counted from the end: vmap puts its own in front.
  long last(long i) const { return rank >= i ? dims[rank - i] : 0; }
  long size() const {
    long total = 1;
    for (long i = 0; i < rank; i++) total *= dims[i];
    return total;
  }
};

class Call {
 public:
  explicit Call(XLA_FFI_CallFrame* frame) : frame_(frame) {}

  // XLA asks a new handler for its version before it runs it.
  bool answered_metadata() const {
    auto* extension = frame_->extension_start;
    if (extension == nullptr || extension->type != XLA_FFI_Extension_Metadata) return false;
    auto* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
    metadata->api_version = XLA_FFI_Api_Version{XLA_FFI_Api_Version_STRUCT_SIZE, nullptr,
                                                XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    metadata->traits = 0;
    metadata->state_type_id = XLA_FFI_TypeId{0};
    return true;
  }

  bool has(long arguments, long results) const {
    return frame_->args.size == arguments && frame_->rets.size == results;
  }
  Array argument(long i) const { return array(frame_->args.args[i]); }
  Array result(long i) const { return array(frame_->rets.rets[i]); }

  long integer(const char* name, long otherwise = 0) const {
    auto* scalar = find(name);
    return scalar && scalar->dtype == XLA_FFI_DataType_S64 ? *(int64_t*)scalar->value : otherwise;
  }
  float number(const char* name, float otherwise = 0) const {
    auto* scalar = find(name);
    return scalar && scalar->dtype == XLA_FFI_DataType_F32 ? *(float*)scalar->value : otherwise;
  }

  XLA_FFI_Error* error(XLA_FFI_Error_Code code, const char* message) const {
    XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message, code};
    return frame_->api->XLA_FFI_Error_Create(&args);
  }

  long threads() const {
    int64_t count = 1;
    XLA_FFI_ThreadPool_NumThreads_Args args{XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr,
                                            frame_->ctx, &count};
    if (auto* problem = frame_->api->XLA_FFI_ThreadPool_NumThreads(&args)) {
      destroy(problem);
      return 1;
    }
    return count > 1 ? count : 1;
  }

  // False if there is no pool; then nothing was scheduled.
  bool schedule(XLA_FFI_Task* task, void* data) const {
    XLA_FFI_ThreadPool_Schedule_Args args{XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr,
                                          frame_->ctx, task, data};
    auto* problem = frame_->api->XLA_FFI_ThreadPool_Schedule(&args);
    if (problem) destroy(problem);
    return problem == nullptr;
  }

 private:
  static Array array(void* value) {
    auto* buffer = static_cast<XLA_FFI_Buffer*>(value);
    return {type(buffer->dtype), buffer->data, buffer->rank, buffer->dims};
  }

  static Type type(XLA_FFI_DataType dtype) {
    switch (dtype) {
      case XLA_FFI_DataType_F32: return Type::float32;
      case XLA_FFI_DataType_BF16: return Type::bfloat16;
      case XLA_FFI_DataType_F16: return Type::float16;
      case XLA_FFI_DataType_S8: return Type::int8;
      case XLA_FFI_DataType_F8E4M3FN: return Type::float8_e4m3;
      case XLA_FFI_DataType_F8E5M2: return Type::float8_e5m2;
      case XLA_FFI_DataType_S32: return Type::int32;
      case XLA_FFI_DataType_PRED: return Type::boolean;
      default: return Type::other;
    }
  }

  const XLA_FFI_Scalar* find(const char* name) const {
    auto& attrs = frame_->attrs;
    for (int64_t i = 0; i < attrs.size; i++) {
      auto* span = attrs.names[i];
      if (attrs.types[i] == XLA_FFI_AttrType_SCALAR && span->len == strlen(name) &&
          memcmp(span->ptr, name, span->len) == 0)
        return static_cast<const XLA_FFI_Scalar*>(attrs.attrs[i]);
    }
    return nullptr;
  }

  void destroy(XLA_FFI_Error* problem) const {
    XLA_FFI_Error_Destroy_Args args{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, problem};
    frame_->api->XLA_FFI_Error_Destroy(&args);
  }

  XLA_FFI_CallFrame* frame_;
};

// Items of work that threads take one after the other, the caller's thread among them.
//
// Nobody ever waits for a task that has not begun, so no number of calls at once can block the
// pool: the caller works until nothing is left to take, and then waits only for the items that
// running threads have taken. A task that begins later finds nothing and is gone. Therefore the
// queue lives until the last of its tasks has seen it, and the work itself only until `run` ends.
class Queue {
 public:
  // Calls work(item, worker) for every item below `count`; `worker` is below `workers` and never
  // the same in two threads at once.
  template <typename Work>
  static void run(const Call& call, long count, long workers, Work& work) {
    if (workers > count) workers = count;
    if (workers <= 1) {
      for (long item = 0; item < count; item++) work(item, 0);
      return;
    }
    auto* queue = new Queue(count, workers, &work, [](void* w, long item, long worker) {
      (*static_cast<Work*>(w))(item, worker);
    });
    for (long i = 1; i < workers; i++)
      if (!call.schedule(&Queue::task, queue)) queue->release();
    queue->take_items();
    queue->wait();
    queue->release();
  }

 private:
  typedef void Step(void* work, long item, long worker);

  Queue(long count, long holders, void* work, Step* step)
      : count_(count), holders_(holders), work_(work), step_(step) {}
  ~Queue() {
    pthread_mutex_destroy(&mutex_);
    pthread_cond_destroy(&all_done_);
  }

  static void task(void* data) {
    auto* queue = static_cast<Queue*>(data);
    queue->take_items();
    queue->release();
  }

  void take_items() {
    long worker = -1, item;
    while ((item = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED)) < count_) {
      if (worker < 0) worker = __atomic_fetch_add(&workers_, 1, __ATOMIC_RELAXED);
      step_(work_, item, worker);
      if (__atomic_add_fetch(&done_, 1, __ATOMIC_ACQ_REL) == count_) {
        pthread_mutex_lock(&mutex_);
        pthread_cond_signal(&all_done_);
        pthread_mutex_unlock(&mutex_);
      }
    }
  }

  void wait() {
    pthread_mutex_lock(&mutex_);
    while (__atomic_load_n(&done_, __ATOMIC_ACQUIRE) < count_)
      pthread_cond_wait(&all_done_, &mutex_);
    pthread_mutex_unlock(&mutex_);
  }

  void release() {
    if (__atomic_sub_fetch(&holders_, 1, __ATOMIC_ACQ_REL) == 0) delete this;
  }

  const long count_;
  long next_ = 0, done_ = 0, workers_ = 0, holders_;
  void* const work_;
  Step* const step_;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t all_done_ = PTHREAD_COND_INITIALIZER;
};

// Memory for the length of a call, in numbers; cut into pieces that begin at cache lines.
//
// Fresh memory costs more than it seems: the system clears every page when it is first touched. So
// some of what calls give back is kept for the next ones.
class Scratch {
 public:
  static long padded(long floats) { return (floats + 15) / 16 * 16; }

  explicit Scratch(long floats) : size_((floats * sizeof(float) / PAGE + 1) * PAGE) {
    Kept& kept = Kept::one();
    pthread_mutex_lock(&kept.mutex);
    for (Piece& piece : kept.pieces)
      if (piece.memory && piece.size >= size_ && piece.size / 2 <= size_) {
        memory_ = piece.memory, size_ = piece.size;
        kept.total -= piece.size;
        piece.memory = nullptr;
        break;
      }
    pthread_mutex_unlock(&kept.mutex);
    if (memory_ == nullptr && posix_memalign(&memory_, size_ < LARGE ? PAGE : LARGE, size_) != 0)
      memory_ = nullptr;
#ifdef MADV_HUGEPAGE
    if (memory_ && size_ >= LARGE) madvise(memory_, size_, MADV_HUGEPAGE);
#endif
  }
  Scratch(const Scratch&) = delete;
  ~Scratch() {
    Kept& kept = Kept::one();
    pthread_mutex_lock(&kept.mutex);
    if (memory_ && kept.total + size_ <= MOST_KEPT)
      for (Piece& piece : kept.pieces)
        if (piece.memory == nullptr) {
          piece = {memory_, size_};
          kept.total += size_;
          memory_ = nullptr;
          break;
        }
    pthread_mutex_unlock(&kept.mutex);
    free(memory_);
  }

  bool failed() const { return memory_ == nullptr; }
  float* begin() const { return static_cast<float*>(memory_); }

 private:
  static constexpr long PAGE = 4096, LARGE = 2 << 20, MOST_KEPT = 32 << 20;
  struct Piece {
    void* memory;
    long size;
  };
  struct Kept {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    Piece pieces[8] = {};
    long total = 0;
    static Kept& one() {
      static Kept kept;
      return kept;
    }
  };

  void* memory_ = nullptr;
  long size_;
};

}  // namespace ejkernel

#endif
