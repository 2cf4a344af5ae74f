// The handler that XLA calls: attention of packed queries over keys and values in pages, on CPU.
//
// Sequences with many query rows go through the tiles of flash attention, which read pages when they
// pack keys; those with few read keys where they lie. Both are cut into tasks, and threads take these
// from one queue: how long a sequence is, or how many there are, does not matter.
#include <new>

#include "forward.h"
#include "single.h"

namespace ejkernel {
namespace {

// With so many rows of a key head packing keys pays off.
constexpr long MANY_ROWS = 24;
// Below this many multiplications waking other threads takes longer than they save.
constexpr double WORTH_SHARING = 1e6;
// Packed keys, values and queries that are in memory at a time, in numbers; a sequence always fits.
constexpr long MOST_PACKED = 16l << 20;

// Memory for so many objects of a type, cleared, for the length of a call.
template <typename T>
struct List {
  explicit List(long count) : items(static_cast<T*>(calloc(count > 0 ? count : 1, sizeof(T)))) {}
  List(const List&) = delete;
  ~List() { free(items); }
  T& operator[](long i) const { return items[i]; }
  T* items;
};

XLA_FFI_Error* wrong(const Call& call, const char* what) {
  return call.error(XLA_FFI_Error_Code_INVALID_ARGUMENT, what);
}

// False if there is a scale that does not fit the pages.
bool read_scale(Paging& paging, const Array& scale, const Array& pages) {
  if (scale.size() == 0) return true;
  const long heads = pages.last(2), size = pages.last(3);
  if (scale.type != Type::float32 || scale.last(1) != heads || scale.rank > 3 || scale.rank < 1 ||
      (scale.rank > 1 && scale.dims[0] != pages.dims[0]) || (scale.rank == 3 && scale.dims[1] != size))
    return false;
  paging.scale = static_cast<const float*>(scale.data);
  paging.scale_page = scale.rank == 3 ? size * heads : scale.rank == 2 ? heads : 0;
  paging.scale_slot = scale.rank == 3 ? heads : 0;
  return true;
}

Array rows_from(const Array& x, long row) {
  Array moved = x;
  moved.data = static_cast<char*>(x.data) + row * x.last(2) * x.last(1) * bytes_of(x.type);
  return moved;
}

XLA_FFI_Error* attend(const Call& call) {
  if (!call.has(9, 1)) return wrong(call, "paged_attention (native) takes 9 arrays and gives 1");
  const Array q = call.argument(0), k = call.argument(1), v = call.argument(2);
  const Array table = call.argument(3), lengths = call.argument(4), starts = call.argument(5);
  const Array sinks = call.argument(6), out = call.result(0);
  if (q.rank != 3 || k.rank != 4 || v.rank != 4 || table.rank != 2 || lengths.rank != 1)
    return wrong(call, "paged_attention (native): an array has the wrong number of axes");
  const long rows = q.dims[0], heads = q.dims[1], pages = k.dims[0], page_size = k.dims[1];
  const long sequences = table.dims[0], per_sequence = table.dims[1];
  if (!is_floating(q.type) || !is_readable(k.type) || !is_readable(v.type) || out.type != q.type ||
      table.type != Type::int32 || lengths.type != Type::int32 || starts.type != Type::int32)
    return wrong(call, "paged_attention (native): an array has the wrong type");

  Problem p{};  // what all sequences have in common
  p.batch = 1, p.heads = heads, p.kv_heads = k.dims[2], p.dim = q.dims[2], p.value_dim = v.dims[3];
  if (!rows || !heads || !p.kv_heads || heads % p.kv_heads || k.dims[3] != p.dim || !p.value_dim ||
      v.dims[0] != pages || v.dims[1] != page_size || v.dims[2] != p.kv_heads || !page_size ||
      out.size() != rows * heads * p.value_dim || lengths.size() != sequences ||
      starts.size() != sequences + 1 || (sinks.size() && sinks.size() != heads) ||
      (sinks.size() && sinks.type != Type::float32))
    return wrong(call, "paged_attention (native): the shapes do not belong together");
  p.group = heads / p.kv_heads;
  p.padded_dim = round_up(p.dim, COLUMNS), p.padded_value_dim = round_up(p.value_dim, COLUMNS);
  p.causal = call.integer("causal");
  p.left = call.integer("window", -1), p.right = -1;
  p.scale = call.number("scale"), p.soft_cap = call.number("soft_cap");
  p.unit = LOG2_E, p.to_log2 = 1, p.sinks = Problem::optional<float>(sinks), p.sinks_same_for = 1;
  p.k = k, p.v = v;
  p.k_paging.size = p.v_paging.size = page_size;
  if (!read_scale(p.k_paging, call.argument(7), k) || !read_scale(p.v_paging, call.argument(8), v))
    return wrong(call, "paged_attention (native): a scale does not fit the pages");
  const long block_q = most(1, call.integer("block_q")), block_k = most(1, call.integer("block_k"));
  const long most_keys = most(BLOCK, least(Task::MOST_KEYS, call.integer("split_k")));

  const int32_t* first = static_cast<const int32_t*>(starts.data);
  const int32_t* length = static_cast<const int32_t*>(lengths.data);
  const int32_t* numbers = static_cast<const int32_t*>(table.data);
  for (long s = 0; s <= sequences; s++)
    if (first[s] < 0 || first[s] > rows || (s > 0 && first[s] < first[s - 1]))
      return wrong(call, "paged_attention (native): query_starts does not rise within the rows");
  for (long s = 0; s < sequences; s++) {
    if (length[s] < 0 || length[s] > per_sequence * page_size)
      return wrong(call, "paged_attention (native): a length is more than its pages hold");
    for (long i = 0; i < ceil_div(length[s], page_size); i++)
      if (numbers[s * per_sequence + i] < 0 || numbers[s * per_sequence + i] >= pages)
        return wrong(call, "paged_attention (native): a page does not exist");
  }

  auto clear = [&](long from, long until) {
    memset(rows_from(out, from).data, 0, (until - from) * heads * p.value_dim * bytes_of(out.type));
  };
  clear(0, first[0]), clear(first[sequences], rows);

  // One problem for every sequence that has something to do: those with many rows first.
  List<Problem> problems(sequences);
  List<Array> outs(sequences);
  List<Forward> passes(sequences);
  List<long> firsts(sequences + 1);
  long prompts = 0, few = 0, tasks = 0, scratch_size = 16;
  double work = 0;
  for (int many = 1; many >= 0; many--)
    for (long s = 0; s < sequences; s++) {
      const long count = first[s + 1] - first[s];
      if (count == 0 || (count * p.group >= MANY_ROWS) != many) continue;
      if (length[s] == 0) {
        clear(first[s], first[s + 1]);
        continue;
      }
      Problem& own = *new (&problems[prompts + few]) Problem(p);
      // Pages that no query sees, before a window, are left out.
      const long before = length[s] - count, seen = p.left < 0 ? 0 : most(0, before - p.left);
      const long skipped = seen / page_size * page_size;
      own.q_len = count, own.k_len = length[s] - skipped, own.offset = before - skipped;
      own.padded_keys = round_up(own.k_len, COLUMNS);
      own.left = p.left < 0 ? -1 : least(p.left, own.k_len + count);
      own.q = rows_from(q, first[s]);
      own.k_paging.table = own.v_paging.table =
          numbers + s * per_sequence + skipped / page_size;
      own.k_paging.keys = own.v_paging.keys = own.k_len;
      const Array to = rows_from(out, first[s]);
      outs[prompts + few] = to;
      work += double(heads) * count * own.k_len * (p.dim + p.value_dim);
      if (many) {
        Forward& pass = *new (&passes[prompts++]) Forward(own, block_q, block_k);
        pass.out = to, pass.lse = Array{Type::other, nullptr, 0, nullptr};
        scratch_size = most(scratch_size, pass.scratch_size());
      } else {
        tasks += ceil_div(own.k_len - (seen - skipped), most_keys);
        scratch_size = most(scratch_size, Task::scratch_size(own));
        few++;
      }
    }

  List<Task> list(tasks);
  long found_size = 0;
  for (long i = 0, at = 0; i < few; i++) {
    const Problem& own = problems[prompts + i];
    firsts[i] = at;
    const long begin = own.left < 0 ? 0 : most(0, own.offset - own.left);
    const long parts = ceil_div(own.k_len - begin, most_keys);
    const long each = round_up(ceil_div(own.k_len - begin, parts), 8);
    for (long t = 0; t < parts; t++, at++) {
      const long from = begin + t * each;
      list[at] = Task{&own, least(from, own.k_len), least(from + each, own.k_len), nullptr};
      found_size += Task::size(own);
    }
    firsts[i + 1] = at;
  }
  const long workers = work < WORTH_SHARING ? 1 : call.threads(), each = Scratch::padded(scratch_size);
  Scratch found(found_size), scratch(workers * each);
  if (found.failed() || scratch.failed())
    return call.error(XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "paged_attention (native): no memory");
  float* place = found.begin();
  for (long t = 0; t < tasks; t++) list[t].found = place, place += Task::size(*list[t].problem);

  // Prompts in rounds that fit into memory; all tasks with few rows in the last.
  long done = 0;
  do {
    long end = done, size = 0;
    while (end < prompts && (end == done || size + passes[end].packed_size() <= MOST_PACKED))
      size += passes[end++].packed_size();
    Scratch packed(size);
    if (packed.failed())
      return call.error(XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "paged_attention (native): no memory");
    // Calls `work(pass, its memory, item)` for an item of all passes of the round.
    auto in_pass = [&](long item, auto items_of, auto work) {
      float* memory = packed.begin();
      for (long i = done; i < end; i++) {
        if (item < items_of(passes[i])) return work(passes[i], memory, item);
        item -= items_of(passes[i]), memory += passes[i].packed_size();
      }
    };
    auto packing = [](const Forward& pass) { return pass.packing_items(); };
    auto attending = [](const Forward& pass) { return pass.row_items(); };
    long pack_items = 0, row_items = 0;
    for (long i = done; i < end; i++)
      pack_items += packing(passes[i]), row_items += attending(passes[i]);
    const long more = end == prompts ? tasks : 0;
    auto pack = [&](long item, long worker) {
      in_pass(item, packing, [&](const Forward& pass, float* memory, long item) {
        pass.pack(memory, scratch.begin() + worker * each, item);
      });
    };
    auto work_on = [&](long item, long worker) {
      float* own = scratch.begin() + worker * each;
      if (item >= row_items) return list[item - row_items].run(own);
      in_pass(item, attending, [&](const Forward& pass, float* memory, long item) {
        pass.attend(memory, own, item);
      });
    };
    Queue::run(call, pack_items, workers, pack);
    Queue::run(call, row_items + more, workers, work_on);
    done = end;
  } while (done < prompts);
  auto join = [&](long i, long) {
    Task::join(&list[firsts[i]], firsts[i + 1] - firsts[i], outs[prompts + i]);
  };
  Queue::run(call, few, few > 4 ? workers : 1, join);
  return nullptr;
}

}  // namespace
}  // namespace ejkernel

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* ejkernel_paged_attention(
    XLA_FFI_CallFrame* frame) {
  ejkernel::Call call(frame);
  return call.answered_metadata() ? nullptr : ejkernel::attend(call);
}
