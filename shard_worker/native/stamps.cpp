// See stamps.h; `words` of chassis/sequence_digest.py is `word` here.
#include "stamps.h"

#include <cstdlib>
#include <cstring>

static_assert(sizeof(shoal_block_stamp) == 32 && sizeof(shoal_slot_stamp) == 24, "as the caller lays them out");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "columns are read as they come");

namespace {

constexpr uint8_t SAMPLES = 1, FRESH = 2;
constexpr uint32_t LAST_SAMPLED = UINT32_MAX;
constexpr uint64_t ONCE = uint64_t(1) << 63, TWICE = uint64_t(1) << 62;  // in a stamp's epoch: written by this step

template <class T>
T at(const void *column, int64_t i) {
    T value;
    std::memcpy(&value, static_cast<const uint8_t *>(column) + i * int64_t(sizeof(T)), sizeof(T));
    return value;
}

uint64_t word(uint32_t token_id, uint64_t position) {
    uint64_t x = (uint64_t(token_id) << 32) + position + 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// The tokens of one row.
struct Row {
    shoal_slot_stamp &slot;
    const int32_t *blocks;
    const void *token_ids;
    int64_t first_token, start, end;

    template <class Visit>
    void written(const shoal_stamps &stamps, Visit &&visit) const {
        for (int64_t index = start / stamps.block_size; index * stamps.block_size < end; index++)
            visit(stamps.blocks[blocks[index]]);
    }

    // From the slot's position on, so far as they lie in one block.
    void write(const shoal_stamps &stamps) const {
        const int64_t size = stamps.block_size, index = slot.position / size, within = slot.position % size;
        const int64_t until = (index + 1) * size < end ? (index + 1) * size : end;
        const uint64_t before = slot.digest;
        for (; slot.position < until; slot.position++) {
            const uint32_t id = at<uint32_t>(token_ids, first_token + slot.position - start);
            slot.digest += word(id == LAST_SAMPLED ? slot.last : id, uint64_t(slot.position));
        }
        shoal_block_stamp &stamp = stamps.blocks[blocks[index]];
        bool known = slot.state == SHOAL_SLOT_GOOD;
        if (within)
            known &= stamp.index == index && (within < -int64_t(stamp.fill) ||
                                              (within == std::abs(stamp.fill) && stamp.end == before));
        else
            stamp.begin = before;
        const uint64_t twice = stamp.epoch & TWICE;
        known &= !twice;
        stamp.end = slot.digest;
        stamp.epoch = stamps.epoch | twice;
        stamp.index = int32_t(index);
        stamp.fill = known ? int32_t(until - index * size) : 0;
    }

    bool proven(const shoal_stamps &stamps) const {
        const int64_t size = stamps.block_size, last = (end - 1) / size;
        const shoal_block_stamp *before = nullptr;
        for (int64_t index = 0; index <= last; index++) {
            const shoal_block_stamp &stamp = stamps.blocks[blocks[index]];
            if (stamp.index != index || stamp.epoch > stamps.epoch || (before && before->end != stamp.begin)) return false;
            if (stamp.fill != (index < last ? size : end - last * size)) return false;
            before = &stamp;
        }
        return before->end == slot.digest;
    }
};

}  // namespace

int64_t shoal_stamps_note(shoal_stamps *stamps, int64_t rows, const void *slots, const void *num_tokens, const void *starts,
                          const void *flags, const void *token_ids, const void *digests, const int32_t *tables,
                          int64_t stride, const uint32_t *sampled, int32_t *void_rows, int64_t num_void) {
    const auto each = [&](auto &&visit) {
        int64_t token = 0;
        for (int64_t i = 0; i < rows; i++) {
            const int64_t start = at<uint32_t>(starts, i), count = at<uint32_t>(num_tokens, i);
            visit(i, Row{stamps->slots[at<uint32_t>(slots, i)], tables + i * stride, token_ids, token, start, start + count});
            token += count;
        }
    };
    int64_t fresh = 0, next_void = 0;
    bool clash = false;
    each([&](int64_t i, const Row &row) {
        shoal_slot_stamp &slot = row.slot;
        if (at<uint8_t>(flags, i) & FRESH) {
            if (digests) slot.digest = at<uint64_t>(digests, fresh);
            slot.state = digests ? SHOAL_SLOT_GOOD : SHOAL_SLOT_UNKNOWN;
            fresh++;
        } else if (slot.position != row.start && slot.state == SHOAL_SLOT_GOOD) {
            slot.state = SHOAL_SLOT_UNKNOWN;
        }
        slot.position = row.start;
        if (next_void < num_void && void_rows[next_void] == i) {
            slot.state = SHOAL_SLOT_VOID;
            next_void++;
        }
        row.written(*stamps, [&](shoal_block_stamp &stamp) {
            clash |= (stamp.epoch & ONCE) != 0;
            stamp.epoch = stamp.epoch & ONCE ? stamp.epoch | TWICE : (stamp.epoch & ~TWICE) | ONCE;
        });
    });
    each([&](int64_t, const Row &row) {
        while (row.slot.position < row.end) row.write(*stamps);
    });
    if (clash)
        each([&](int64_t, const Row &row) {
            row.written(*stamps, [&](shoal_block_stamp &stamp) { stamp.epoch &= ~TWICE; });
        });
    int64_t found = 0, samples = 0;
    each([&](int64_t i, const Row &row) {
        stamps->turn += stamps->rate;
        const bool chosen = stamps->turn >> 32;
        stamps->turn &= UINT32_MAX;
        if (row.slot.state == SHOAL_SLOT_GOOD && chosen && !row.proven(*stamps)) row.slot.state = SHOAL_SLOT_VOID;
        if (row.slot.state == SHOAL_SLOT_VOID) void_rows[found++] = int32_t(i);
        if (sampled && (at<uint8_t>(flags, i) & SAMPLES)) row.slot.last = sampled[samples++];
    });
    int64_t next = 0;
    if (found)
        each([&](int64_t i, const Row &row) {
            if (next == found || void_rows[next] != i) return;
            row.written(*stamps, [](shoal_block_stamp &stamp) { stamp.fill = 0; });
            next++;
        });
    return found;
}
