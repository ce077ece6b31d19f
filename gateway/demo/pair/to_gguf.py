# mypy: ignore-errors
"""HF folder -> GGUF (float32) with the gguf package: python to_gguf.py SRC OUT NAME."""
import sys, json, numpy as np, torch
from gguf import GGUFWriter, TokenType, GGMLQuantizationType
from safetensors.torch import load_file
src, out, name = sys.argv[1:4]
cfg = json.load(open(f"{src}/config.json")); sd = load_file(f"{src}/model.safetensors"); tj = json.load(open(f"{src}/tokenizer.json"))
w = GGUFWriter(out, "qwen3"); w.add_name(name); w.add_block_count(cfg["num_hidden_layers"]); w.add_context_length(cfg["max_position_embeddings"])
w.add_embedding_length(cfg["hidden_size"]); w.add_feed_forward_length(cfg["intermediate_size"]); w.add_head_count(cfg["num_attention_heads"]); w.add_head_count_kv(cfg["num_key_value_heads"])
w.add_key_length(cfg["head_dim"]); w.add_value_length(cfg["head_dim"]); w.add_layer_norm_rms_eps(cfg["rms_norm_eps"]); w.add_rope_freq_base(cfg.get("rope_theta") or cfg["rope_parameters"]["rope_theta"])
w.add_file_type(0); w.add_vocab_size(cfg["vocab_size"])
vocab = tj["model"]["vocab"]; added = {t["id"]: t for t in tj["added_tokens"]}; n = cfg["vocab_size"]
inv = {i: t for t, i in vocab.items()}; toks, types = [], []
for i in range(n):
    if i in added: toks.append(added[i]["content"]); types.append(TokenType.USER_DEFINED if "think" in added[i]["content"] else TokenType.CONTROL)
    elif i in inv: toks.append(inv[i]); types.append(TokenType.NORMAL)
    else: toks.append(f"[PAD{i}]"); types.append(TokenType.UNUSED)
merges = [" ".join(m) if isinstance(m, list) else m for m in tj["model"]["merges"]]
w.add_tokenizer_model("gpt2"); w.add_tokenizer_pre("smollm"); w.add_token_list(toks); w.add_token_types(types); w.add_token_merges(merges)
ids = {t["content"]: t["id"] for t in tj["added_tokens"]}
w.add_eos_token_id(ids["<|im_end|>"]); w.add_pad_token_id(ids["<|endoftext|>"]); w.add_add_bos_token(False)
w.add_chat_template(open(f"{src}/chat_template.jinja").read())
def put(name, t, f16): a = t.float().numpy(); w.add_tensor(name, a.astype(np.float32))
put("token_embd.weight", sd["model.embed_tokens.weight"], True); put("output_norm.weight", sd["model.norm.weight"], False)
M = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
for l in range(cfg["num_hidden_layers"]):
    for h, g in M.items(): t = sd[f"model.layers.{l}.{h}.weight"]; put(f"blk.{l}.{g}.weight", t, t.dim() > 1)
w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
