// llama.cpp through its own library, for the bench: reads runs from standard input, answers with times.
//
//   driver MODEL THREADS SEQUENCES CONTEXT_LEN     then, a run a line: OUTPUT_TOKENS COUNT {LEN ID...}
//   driver --convert FROM TO TYPE                  TYPE: F32, F16, BF16, Q8_0
//
// A run's sequences start together: their prompts in batches, then one token of each a step, greedy. An answer
// is a line: SECONDS and for each sequence FIRST LAST TOKENS. The last prompt that was alone stays in memory of
// its own, and what a later prompt shares with it is copied from there, as a server's prompt cache does.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "llama.h"

namespace {

constexpr int BATCH = 2048, PART = 512;

using Clock = std::chrono::steady_clock;
using Ids = std::vector<llama_token>;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

[[noreturn]] void fail(const std::string &why) {
    std::cerr << why << "\n";
    exit(1);
}

struct Sequence {
    Ids prompt;
    int done = 0;  // of the prompt
    int tokens = 0;
    llama_token last = 0;
    double first_s = 0, last_s = 0;
};

struct Driver {
    llama_context *context;
    llama_memory_t memory;
    int vocab, kept_seq;
    llama_batch batch;
    Ids kept;

    void add(llama_token id, int position, int sequence, bool wanted) {
        int i = batch.n_tokens++;
        batch.token[i] = id;
        batch.pos[i] = position;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i] = wanted;
    }

    llama_token greedy(int place) {
        const float *logits = llama_get_logits_ith(context, place);
        int best = 0;
        for (int i = 1; i < vocab; i++)
            if (logits[i] > logits[best]) best = i;
        return best;
    }

    void reuse(Sequence &s, int number) {
        size_t shared = 0;
        while (shared < kept.size() && shared + 1 < s.prompt.size() && kept[shared] == s.prompt[shared]) shared++;
        if (shared < 64) return;
        llama_memory_seq_cp(memory, kept_seq, number, -1, -1);
        llama_memory_seq_rm(memory, number, (llama_pos)shared, -1);
        s.done = (int)shared;
    }

    void step(std::vector<Sequence> &all, Clock::time_point start, int output_tokens) {
        batch.n_tokens = 0;
        std::map<int, int> wanted;  // sequence -> place in the batch
        for (size_t i = 0; i < all.size(); i++) {
            Sequence &s = all[i];
            if (s.tokens >= output_tokens) continue;
            if (s.tokens) {
                if (batch.n_tokens == BATCH) break;
                wanted[i] = batch.n_tokens;
                add(s.last, (int)s.prompt.size() + s.tokens - 1, i, true);
                continue;
            }
            while (s.done < (int)s.prompt.size() && batch.n_tokens < BATCH) {
                bool end = s.done + 1 == (int)s.prompt.size();
                if (end) wanted[i] = batch.n_tokens;
                add(s.prompt[s.done], s.done, i, end);
                s.done++;
            }
        }
        if (llama_decode(context, batch)) fail("llama_decode failed");
        for (auto [i, place] : wanted) {
            Sequence &s = all[i];
            s.last = greedy(place);
            s.last_s = since(start);
            if (!s.tokens++) s.first_s = s.last_s;
        }
    }

    void run(std::vector<Sequence> &all, int output_tokens) {
        auto start = Clock::now();
        for (size_t i = 0; i < all.size(); i++) reuse(all[i], (int)i);
        bool more = true;
        while (more) {
            step(all, start, output_tokens);
            more = false;
            for (const Sequence &s : all) more |= s.tokens < output_tokens;
        }
        printf("%.9f", since(start));
        for (const Sequence &s : all) printf(" %.9f %.9f %d", s.first_s, s.last_s, s.tokens);
        printf("\n");
        fflush(stdout);
        if (all.size() == 1) {
            llama_memory_seq_rm(memory, kept_seq, -1, -1);
            llama_memory_seq_cp(memory, 0, kept_seq, -1, -1);
            kept = all[0].prompt;
        }
        for (size_t i = 0; i < all.size(); i++) llama_memory_seq_rm(memory, (llama_seq_id)i, -1, -1);
    }
};

int convert(const char *from, const char *to, const std::string &type) {
    const std::map<std::string, llama_ftype> types = {
        {"F32", LLAMA_FTYPE_ALL_F32},
        {"F16", LLAMA_FTYPE_MOSTLY_F16},
        {"BF16", LLAMA_FTYPE_MOSTLY_BF16},
        {"Q8_0", LLAMA_FTYPE_MOSTLY_Q8_0},
    };
    auto params = llama_model_quantize_default_params();
    params.nthread = 2;
    params.allow_requantize = true;
    params.ftype = types.at(type);
    return (int)llama_model_quantize(from, to, &params);
}

}  // namespace

int main(int argc, char **argv) {
    llama_backend_init();
    if (argc == 5 && !strcmp(argv[1], "--convert")) return convert(argv[2], argv[3], argv[4]);
    if (argc != 5) fail("usage: driver MODEL THREADS SEQUENCES CONTEXT_LEN");
    int threads = atoi(argv[2]), sequences = atoi(argv[3]), length = atoi(argv[4]);
    llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) fail("the model can't be loaded");
    auto params = llama_context_default_params();
    params.n_ctx = (uint32_t)(length * (sequences + 1));
    params.n_batch = BATCH;
    params.n_ubatch = PART;
    params.n_seq_max = (uint32_t)(sequences + 1);
    params.n_threads = params.n_threads_batch = threads;
    llama_context *context = llama_init_from_model(model, params);
    if (!context) fail("no context");
    int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    Driver driver{context, llama_get_memory(context), vocab, sequences, llama_batch_init(BATCH, 0, 1), {}};
    printf("%s\n", llama_print_system_info());
    fflush(stdout);
    int output_tokens, count;
    while (std::cin >> output_tokens >> count) {
        if (count > sequences) fail("too many sequences");
        std::vector<Sequence> all((size_t)count);
        for (Sequence &s : all) {
            size_t size;
            std::cin >> size;
            s.prompt.resize(size);
            for (llama_token &id : s.prompt) std::cin >> id;
        }
        driver.run(all, output_tokens);
    }
    llama_free(context);
    llama_model_free(model);
}
