// What a comparison needs of llama.cpp, through its C interface: files that it quantises, logits, token ids.
//
//     peer quantize IN.gguf OUT.gguf TYPE        TYPE as llama.cpp names it, e.g. Q4_K_M
//     peer logits MODEL.gguf IDS.u32 OUT.logits  one row of f32 a token, K and V in bf16
//     peer tokenize MODEL.gguf                   stdin: a count and so many ids (32 bits each) in turns; stdout, a JSON array
//                                                each: the ids that the text has which those ids spell
#include "llama.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

static const std::pair<const char *, llama_ftype> TYPES[] = {
    {"F32", LLAMA_FTYPE_ALL_F32},           {"F16", LLAMA_FTYPE_MOSTLY_F16},
    {"BF16", LLAMA_FTYPE_MOSTLY_BF16},      {"Q8_0", LLAMA_FTYPE_MOSTLY_Q8_0},
    {"Q4_0", LLAMA_FTYPE_MOSTLY_Q4_0},      {"Q4_1", LLAMA_FTYPE_MOSTLY_Q4_1},
    {"Q4_K_S", LLAMA_FTYPE_MOSTLY_Q4_K_S},  {"Q4_K_M", LLAMA_FTYPE_MOSTLY_Q4_K_M},
    {"Q5_K_M", LLAMA_FTYPE_MOSTLY_Q5_K_M},  {"Q6_K", LLAMA_FTYPE_MOSTLY_Q6_K},
};

static int quantize(const char *in, const char *out, const char *type) {
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.allow_requantize = true;
    for (auto [name, value] : TYPES) {
        if (strcmp(name, type) == 0) {
            params.ftype = value;
            return llama_model_quantize(in, out, &params);
        }
    }
    fprintf(stderr, "type: found %s\n", type);
    return 2;
}

static int logits(llama_model *model, const char *ids_path, const char *out_path) {
    std::vector<llama_token> ids;
    FILE *file = fopen(ids_path, "rb");
    if (!file) return 1;
    for (int32_t id; fread(&id, sizeof id, 1, file) == 1;) ids.push_back(id);
    fclose(file);

    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = ids.size();
    params.n_threads = params.n_threads_batch = 2;
    params.type_k = params.type_v = GGML_TYPE_BF16;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context *context = llama_init_from_model(model, params);
    if (!context) return 1;

    llama_batch batch = llama_batch_init(ids.size(), 0, 1);
    batch.n_tokens = ids.size();
    for (size_t i = 0; i < ids.size(); i++) {
        batch.token[i] = ids[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    if (llama_decode(context, batch)) return 1;
    size_t width = llama_vocab_n_tokens(llama_model_get_vocab(model));
    FILE *out = fopen(out_path, "wb");
    if (!out) return 1;
    for (size_t i = 0; i < ids.size(); i++) fwrite(llama_get_logits_ith(context, i), sizeof(float), width, out);
    return fclose(out);
}

static int tokenize(llama_model *model) {
    const llama_vocab *vocab = llama_model_get_vocab(model);
    for (uint32_t given; fread(&given, sizeof given, 1, stdin) == 1;) {
        std::string text;
        for (uint32_t i = 0; i < given; i++) {
            llama_token id;
            char piece[1024];
            if (fread(&id, sizeof id, 1, stdin) != 1) return 1;
            text.append(piece, llama_token_to_piece(vocab, id, piece, sizeof piece, 0, true));
        }
        std::vector<llama_token> ids(text.size() + 8);
        int count = llama_tokenize(vocab, text.data(), text.size(), ids.data(), ids.size(), false, true);
        printf("[");
        for (int i = 0; i < count; i++) printf("%s%d", i ? "," : "", ids[i]);
        printf("]\n");
    }
    return 0;
}

int main(int argc, char **argv) {
    auto errors_only = [](ggml_log_level level, const char *text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
    };
    llama_log_set(errors_only, nullptr);
    llama_backend_init();
    std::string verb = argc > 2 ? argv[1] : "";
    if (verb == "quantize" && argc == 5) return quantize(argv[2], argv[3], argv[4]);

    llama_model_params params = llama_model_default_params();
    params.vocab_only = verb == "tokenize";
    llama_model *model = llama_model_load_from_file(argv[argc > 2 ? 2 : 0], params);
    if (!model) return 1;
    if (verb == "logits" && argc == 5) return logits(model, argv[3], argv[4]);
    if (verb == "tokenize" && argc == 3) return tokenize(model);
    return 2;
}
