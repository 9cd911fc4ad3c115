// One unit's way over the blocks: tiles outside, heads and rows inside, so that a tile's keys and values serve all of
// the unit from the first cache while the next one's are on their way.
//
// Rows of sequences that begin with the same blocks share panels there, and each goes on by itself where its own blocks
// begin. Strips of 16 positions, tiles of 4 strips and pieces of 8 tiles are counted from a sequence's start: where one
// ends does not depend on the chunk. A piece has sums of its own, which join those before it in order.
#pragma once

#include <algorithm>
#include <climits>

#include "attention.h"
#include "attention_panel.h"

namespace shoal {

constexpr int64_t PIECE_STRIPS = 8 * TILE_STRIPS;

inline int64_t tile_start(int64_t strip) { return strip / TILE_STRIPS * TILE_STRIPS; }

// A sequence of a unit, and its rows under each head.
struct Member {
    const int32_t *table;
    int64_t first, end;          // strips, from the start of a tile
    int64_t shared;              // strips that are those of the member before: whole tiles
    int32_t position_low, low_high;  // what each of its rows sees: [low_high, position_low]
    int32_t low_low, position_high;  // what any of them sees
    int64_t begin, rows;         // under the unit's first head
};

// Members [member, end) over one tile under one head.
struct Visit {
    int64_t tile, head, member, end;
};

template <class V, typename T>
class UnitWalk {
    typedef PanelKernel<V, T> Kernel;

public:
    UnitWalk(const AttentionCall &call, const AttentionUnit &unit, void *scratch)
        : call_(call), shape_(call.shape), unit_(unit), per_block_(shape_.block_pad() / WIDTH),
          group_(shape_.group()), a_head_(unit.count * group_), qkv_width_(shape_.qkv_width()),
          rows_(*QueryRows::place(scratch, unit.heads * a_head_, shape_.head_dim)) {
        char *at = (char *)QueryRows::in(scratch) + QueryRows::bytes(rows_.count, shape_.head_dim);
        for (Panel &panel : panels_) {
            panel.of = &rows_;
            panel.scores = (float *)at, panel.best = panel.scores + PANEL * TILE;
            at = (char *)(panel.best + WIDTH);
        }
        members_ = (Member *)at;
        num_members_ = unit.sharers ? unit.count : 1;
        for (int64_t i = 0; i < num_members_; i++) take_member(i);
        if (unit.pieces) {
            first_ = std::max<int64_t>(first_, unit.piece * PIECE_STRIPS);
            end_ = std::min<int64_t>(end_, (unit.piece + 1) * PIECE_STRIPS);
        }
        take_rows();
    }

    static size_t scratch_bytes(int64_t rows, int64_t head_dim) {
        return QueryRows::bytes(rows, head_dim) + 2 * (PANEL * TILE + WIDTH) * sizeof(float) + rows * sizeof(Member) + 64;
    }

    void walk(const AttentionUnit *next) {
        Visit visit{first_, 0, -1, 0}, then;
        Strip strips[3][TILE_STRIPS];  // of the panel that waits, of this visit, of the one after it
        bool more = first_ < end_ && advance(visit);  // a piece may lie before the window
        int count = more ? tile(visit, strips[0]) : 0, count_then = 0;
        for (int at = 0; more; at = (at + 1) % 3, visit = then, count = count_then) {
            Strip *ahead = strips[(at + 1) % 3];
            then = visit;
            if ((more = advance(then)))
                count_then = tile(then, ahead);
            else if (next)
                first_tile(*next, ahead);
            else
                std::copy(strips[at], strips[at] + TILE_STRIPS, ahead);
            over_rows(visit, strips[at], ahead, count);
            if (more && then.tile > visit.tile && then.tile % PIECE_STRIPS == 0) weigh(), Kernel::join(rows_);
        }
        weigh();
        if (unit_.pieces) return;
        if (rows_.joined) Kernel::join(rows_);
        each_row([&](int64_t row, int64_t token, int64_t head) {
            float *out = call_.out + (token * shape_.heads + head) * shape_.head_dim;
            Kernel::finish(rows_, row, shape_.head_dim, out);
        });
    }

    // Of a unit whose pieces are all in their slots.
    static void join(const AttentionCall &call, const AttentionUnit &unit, char *slots) {
        const int64_t head_dim = call.shape.head_dim, slot_bytes = attention_slot_bytes(call.shape);
        const QueryRows &all = *QueryRows::in(slots + unit.slot * slot_bytes);
        for (int32_t piece = 1; piece < unit.pieces; piece++)
            Kernel::add(all.now, QueryRows::in(slots + (unit.slot + piece) * slot_bytes)->now, all.count, all.width);
        float *out = call.out + (unit.first * call.shape.heads + unit.head * call.shape.group()) * head_dim;
        for (int64_t r = 0; r < all.count; r++) Kernel::finish(all, r, head_dim, out + r * head_dim);
    }

private:
    int32_t lowest_seen(int32_t position) const {
        return call_.window ? (int32_t)std::max<int64_t>(0, position - call_.window + 1) : 0;
    }
    const int32_t *table(int64_t row) const { return call_.step.block_tables + row * call_.step.table_stride; }

    void take_member(int64_t i) {
        const Sharer *sharer = unit_.sharers ? unit_.sharers + i : nullptr;
        const int64_t token = sharer ? sharer->token : unit_.first, tokens = sharer ? 1 : unit_.count;
        Member &member = members_[i];
        member.table = table(sharer ? sharer->row : unit_.row);
        member.position_low = call_.step.positions[token];
        member.position_high = call_.step.positions[token + tokens - 1];
        member.low_low = lowest_seen(member.position_low), member.low_high = lowest_seen(member.position_high);
        member.first = tile_start(strip_of(shape_, member.low_low));
        member.end = strip_of(shape_, member.position_high) + 1;
        member.shared = sharer && i ? sharer->tiles * TILE_STRIPS : 0;
        member.begin = i * group_, member.rows = tokens * group_;
        first_ = std::min(first_, member.first), end_ = std::max(end_, member.end);
    }

    // f(row, its token, its query head).
    template <typename F>
    void each_row(F f) const {
        int64_t row = 0;
        for (int64_t h = unit_.head; h < unit_.head + unit_.heads; h++)
            for (int64_t i = 0; i < unit_.count; i++) {
                const int64_t token = unit_.sharers ? unit_.sharers[i].token : unit_.first + i;
                for (int64_t head = h * group_; head < (h + 1) * group_; head++) f(row++, token, head);
            }
    }

    void take_rows() {
        const float scale = Kernel::query_scale(shape_.scale, shape_.softcap);
        each_row([&](int64_t row, int64_t token, int64_t head) {
            const float *query = call_.qkv + token * qkv_width_ + head * shape_.head_dim;
            Kernel::take_query(query, scale, shape_.head_dim, rows_, row);
            rows_.position[row] = call_.step.positions[token];
            rows_.low[row] = lowest_seen(rows_.position[row]);
        });
        rows_.now.clear(rows_.count, rows_.width);
    }

    // The next members with the same strips: of this tile and head, else of the next.
    bool advance(Visit &visit) const {
        int64_t from = visit.member < 0 ? 0 : visit.end;
        for (;;) {
            while (from < num_members_ && (members_[from].first > visit.tile || members_[from].end <= visit.tile))
                from++;
            if (from < num_members_) break;
            from = 0;
            if (++visit.head < unit_.heads) continue;
            visit.head = 0, visit.tile += TILE_STRIPS;
            if (visit.tile >= end_) return false;
        }
        visit.member = from, visit.end = from + 1;
        while (visit.end < num_members_ && members_[visit.end].shared > visit.tile) visit.end++;
        return true;
    }

    Strip strip(const int32_t *table, int64_t index, int64_t head) const {
        const int64_t block = index / per_block_, within = index % per_block_ * WIDTH;
        const Word *keys = (const Word *)call_.pages + (table[block] * shape_.kv_heads + head) * shape_.head_size();
        return {keys + within, keys + shape_.key_size() + within / shape_.per_word() * shape_.head_dim,
                (int32_t)(block * shape_.block_size + within),
                (int32_t)std::min<int64_t>(WIDTH, shape_.block_size - within)};
    }
    // The strips of a tile, up to `end`; the last one stands for those that there are not.
    int tile(const int32_t *table, int64_t first, int64_t end, int64_t head, Strip *strips) const {
        const int count = (int)std::min<int64_t>(TILE_STRIPS, end - first);
        for (int s = 0; s < TILE_STRIPS; s++)
            strips[s] = s < count ? strip(table, first + s, head) : strips[count - 1];
        return count;
    }
    int tile(const Visit &visit, Strip *strips) const {
        int64_t end = 0;
        for (int64_t i = visit.member; i < visit.end; i++) end = std::max(end, members_[i].end);
        return tile(members_[visit.member].table, visit.tile, std::min(end, end_), unit_.head + visit.head, strips);
    }
    // What another unit begins with.
    void first_tile(const AttentionUnit &next, Strip *strips) const {
        const int32_t position = call_.step.positions[next.first];
        const int64_t first = tile_start(strip_of(shape_, lowest_seen(position)));
        tile(table(next.row), std::max<int64_t>(first, next.pieces ? next.piece * PIECE_STRIPS : 0),
             strip_of(shape_, position) + 1, next.head, strips);
    }

    // A panel's scores are under way while the last one's become weights.
    void over_rows(const Visit &visit, const Strip *strips, const Strip *ahead, int count) {
        const Member &first = members_[visit.member], &last = members_[visit.end - 1];
        const int64_t begin = visit.head * a_head_ + first.begin, rows = last.begin + last.rows - first.begin;
        const bool all_seen = count == TILE_STRIPS && seen_by_all(visit, strips);
        const int64_t panels = (rows + PANEL - 1) / PANEL;
        for (int64_t i = 0; i < panels; i++) {
            Panel &panel = panels_[free_];
            panel.begin = (int)(begin + rows * i / panels);
            panel.rows = (int)(begin + rows * (i + 1) / panels) - panel.begin;
            panel.count = count, panel.all_seen = all_seen, panel.last = INT_MAX;
            if (!all_seen && !see(panel, strips)) continue;
            Kernel::scores(panel, strips, ahead, shape_.head_dim, shape_.block_pad());
            weigh();
            waiting_ = &panel, strips_ = strips, ahead_ = ahead;
            free_ ^= 1, ahead = strips;
            if (panels == 1) weigh();
        }
    }
    void weigh() {
        if (waiting_) Kernel::values(*waiting_, strips_, ahead_, shape_.head_dim, shape_.softcap);
        waiting_ = nullptr;
    }

    bool seen_by_all(const Visit &visit, const Strip *strips) const {
        if (shape_.block_size % WIDTH) return false;  // strips may be short
        for (int64_t i = visit.member; i < visit.end; i++) {
            const Member &member = members_[i];
            if (strips[0].position < member.low_high) return false;
            if (strips[TILE_STRIPS - 1].position + WIDTH - 1 > member.position_low) return false;
        }
        return true;
    }
    // Whether the panel sees anything of the strips; of what.
    bool see(Panel &panel, const Strip *strips) const {
        int32_t first = INT_MAX, last = 0;
        for (int r = panel.begin; r < panel.begin + panel.rows; r++)
            first = std::min(first, rows_.low[r]), last = std::max(last, rows_.position[r]);
        while (panel.count && strips[panel.count - 1].position > last) panel.count--;
        panel.last = last;
        return panel.count && strips[panel.count - 1].position + WIDTH > first;
    }

    const AttentionCall &call_;
    const AttentionShape &shape_;
    const AttentionUnit &unit_;
    const int64_t per_block_, group_, a_head_;  // strips of a block, query heads of a KV head, rows under one
    const int64_t qkv_width_;
    QueryRows &rows_;
    Panel panels_[2];
    int free_ = 0;                 // the one that does not wait
    Panel *waiting_ = nullptr;     // it has its scores, of strips_; while they are weighed ahead_ comes into the cache
    const Strip *strips_, *ahead_;
    Member *members_;
    int64_t num_members_;
    int64_t first_ = INT64_MAX, end_ = 0;
};

}  // namespace shoal
