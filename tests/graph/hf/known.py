"""Which architectures the tests hold to what.

`IN_FOUR` and `IN_TWO` are the short list, chosen over all families; `FULL` are all
others that passed every check in two stages when they were last measured with
`python -m benchmarks.hf_coverage`, `FULL_IN_FOUR` those that the full run also cuts in
four. `FIXED_SIZES` split with the right results, but
only for the sizes, or values, they were traced with: some part of them asks for a size
as a plain number, or for a value of the inputs. `REFUSED` keep state that a stage cannot follow.
"""

__all__ = ["FIXED_SIZES", "FULL", "FULL_IN_FOUR", "IN_FOUR", "IN_TWO", "REFUSED"]


def _names(text: str) -> list[str]:
    return text.split()


IN_FOUR = [
    "llama",
    "qwen3",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "falcon",
    "cohere",
    "bert",
    "distilbert",
    "xlm-roberta",
    "modernbert",
    "t5",
    "bart",
    "mixtral",
    "vit",
    "convnext",
    "resnet",
    "whisper",
    "wav2vec2",
    "clip",
    "git",
]

IN_TWO = [
    "mistral",
    "qwen2",
    "phi3",
    "opt",
    "bloom",
    "olmo2",
    "starcoder2",
    "granite",
    "roberta",
    "electra",
    "mpnet",
    "xlnet",
    "mt5",
    "pegasus",
    "m2m_100",
    "t5gemma",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "recurrent_gemma",
    "deit",
    "segformer",
    "hubert",
    "siglip",
    "blip",
]

FULL = _names(
    """
    afmoe aimv2 aimv2_vision_model align altclip apertus arcee aria_text
    audio-spectrogram-transformer audioflamingo3 axk1 axk2 aya_vision bailing_hybrid bamba beam
    beit bert-generation big_bird bigbird_pegasus biogpt bit bitnet blenderbot blenderbot-small
    blip-2 blt bridgetower camembert canary canine chinese_clip chinese_clip_vision_model
    clip_text_model clip_vision_model clipseg codegen cohere2 cohere2_moe cohere2_vision
    cohere_asr cohere_compass_text cohere_compass_vision conditional_detr convbert convnextv2
    cosmos3_edge_text cosmos3_edge_vision cosmos3_omni ctrl cvt cwm dac data2vec-audio
    data2vec-text data2vec-vision dbrx deberta deberta-v2 decision_transformer deepseek_v2
    deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl deformable_detr depth_anything detr diffllama
    dinov2 dinov2_with_registers dinov3_convnext dinov3_vit doge donut-swin dots1 dots3_note_text
    dpr dpt efficientnet embedding_gemma2 embedding_gemma2_text encodec encoder-decoder ernie
    ernie4_5 ernie4_5_moe esm esmc eurobert evolla exaone4 exaone4_5 exaone4_5_vision exaone_moe
    falcon_h1 falcon_mamba flaubert flava flex_olmo flint florence2 fnet focalnet fsmt fuyu gemma
    gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4
    glm46v glm4_moe glm4_moe_lite glm4v glm4v_moe_vision glm4v_vision glm5_next_vision
    glm_image_vision glm_moe_dsa glm_ocr_vision glmasr glpn got_ocr2 gpt-sw3 gpt_bigcode gpt_neo
    gpt_neox_japanese gptj granite_docling_text granite_speech granite_speech_plus granite_swa
    granitemoe granitemoe_swa granitemoehybrid granitemoeshared groupvit gte helium hgnet_v2 hiera
    higgs_audio_v2 hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax hyperclovax_vision_v2
    ibert idefics3 ijepa imagegpt inkling2_text inkling_text instructblip internlm3 internvl
    internvl_vision iquestcoder jais2 jamba jetmoe jina_embeddings_v3 kimi_linear kolibri1
    kosmos-2 kosmos-2.5 laguna lasr_ctc lasr_encoder layoutlm layoutlmv3 led levit lfm2 lfm2_moe
    lfm3 lighton_ocr llama4 llama4_text llava llava_next llava_next_video llava_onevision
    longcat_flash longformer longt5 luke lxmert mamba mamba2 marian markuplm maskformer-swin mbart
    megatron-bert mellum metaclip_2 mgp-str mimo_v2_flash minicpm3 minicpm_ocr minicpmv4_6 minimax
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral3 mlcd mlcd_vision_model mllama
    mobilebert mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 modernbert-decoder modernvbert
    molmo2_text moonshine moonshine_streaming moshi moss_transcribe_diarize mpt mra
    muse_glimmer_text muse_spark_text musicflamingo mvp nanochat nemo_speechlm nemotron
    nemotron3_5_asr nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_audio
    nemotron3_diarization nemotron3_diarization_audio nemotron_asr_streaming
    nemotron_asr_streaming_encoder nemotron_h neomme nllb-moe nomic_bert nystromformer olmo olmo3
    olmo_hybrid openai-gpt openai_privacy_filter ovis2 owlv2 owlvit paligemma parakeet_ctc
    parakeet_encoder parakeet_rnnt parakeet_tdt patchtst pegasus_x persimmon phi phi4_multimodal
    phimoe pix2struct pixio plbart poolformer pop2piano pp_chart2table pp_formulanet pp_lcnet
    prophetnet pvt pvt_v2 qianfan_ocr qianfan_ocr_vision qwen2_5_vl qwen2_5_vl_text
    qwen2_5_vl_vision qwen2_audio qwen2_moe qwen2_vl qwen2_vl_text qwen3_5 qwen3_5_moe
    qwen3_5_moe_text qwen3_5_moe_vision qwen3_5_text qwen3_5_vision qwen3_asr qwen3_next qwen3_vl
    qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_moe_vision qwen3_vl_text qwen3_vl_vision
    qwen4_exp_vision radio regnet rembert roberta-prelayernorm roc_bert roformer rt_detr
    rt_detr_v2 sam sam3_vision_model sam3_vit_model sam_hq sam_hq_vision_model sam_vision_model
    seamless_m4t seamless_m4t_v2 seed_oss sew sew-d shieldgemma2 siglip2 siglip2_vision_model
    siglip_vision_model smollm3 solar_open speech-encoder-decoder speech_to_text speecht5 splinter
    stablelm swiftformer swin swinv2 switch_transformers t5gemma2 table-transformer tapas textnet
    timesformer tipsv2 tipsv2_text_model tipsv2_vision_model trocr ultrabert ultravbert umt5
    unispeech unispeech-sat univnet vaultgemma vibevoice_asr video_llava videomae videoprism
    videoprism_vision_model vilt vipllava visual_bert vit_mae vit_msn vitdet vivit voxtral
    wav2vec2-bert wav2vec2-conformer wavlm xclip xglm xlm xlm-roberta-xl xmod yolos yoso youtu
    zamba zamba2 zaya
    """
)

FULL_IN_FOUR = _names(
    """
    audio-spectrogram-transformer big_bird biogpt blenderbot bridgetower codegen cohere2
    convnextv2 cvt deepseek_v3 dinov2 gemma gemma3_text glm glm4 gpt_bigcode gpt_neo gptj
    granitemoe jetmoe levit lfm2 longt5 marian mbart mobilevit mpt nemotron nystromformer olmo
    persimmon phi phimoe poolformer pvt qwen2_moe qwen3_next regnet roformer smollm3
    speech_to_text stablelm switch_transformers umt5 unispeech wavlm xglm yolos zamba2
    """
)

FIXED_SIZES = _names(
    """
    cpmant funnel hunyuan_vl_vision idefics2 lfm3_vl_vision minimax_m3_vl pixtral smolvlm udop
    xlstm
    """
)

# RWKV rescales its weights in its first evaluation; RF-DETR has other sizes there.
REFUSED = ["rf_detr", "rwkv"]
