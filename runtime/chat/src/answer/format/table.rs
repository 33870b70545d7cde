//! All formats.

use super::{
    CallKeys, Calls, Channels, Format, Ids, JsonCalls, LiteralCalls, NamedCalls, Style, TaggedCalls,
};

const USUAL: CallKeys = CallKeys {
    name: &["name", "tool_name", "function"],
    arguments: &["arguments", "parameters", "args"],
    id: &["id", "tool_call_id", "call_id"],
    name_is_key: false,
    id_is_last: false,
};

const THINK: &[(&str, &str)] = &[("<think>", "</think>")];

const fn json(
    name: &'static str,
    open: &'static [&'static str],
    close: &'static [&'static str],
) -> Format {
    let calls = JsonCalls {
        open,
        close,
        separator: "",
        is_bare: false,
        keys: USUAL,
    };
    Format {
        name,
        thoughts: THINK,
        hidden: &[],
        calls: Calls::Json(calls),
        ids: Ids::Made,
    }
}

const fn keyed(format: Format, keys: CallKeys) -> Format {
    match format.calls {
        Calls::Json(calls) => Format {
            calls: Calls::Json(JsonCalls { keys, ..calls }),
            ..format
        },
        _ => format,
    }
}

const fn thinking(
    format: Format,
    thoughts: &'static [(&'static str, &'static str)],
    hidden: &'static [&'static str],
) -> Format {
    Format {
        thoughts,
        hidden,
        ..format
    }
}

const fn named(name: &'static str, calls: NamedCalls) -> Format {
    Format {
        name,
        thoughts: THINK,
        hidden: &[],
        calls: Calls::Named(calls),
        ids: Ids::Made,
    }
}

const NAMED: NamedCalls = NamedCalls {
    section: None,
    open: "",
    id_end: None,
    id_open: None,
    middle: "",
    fence: "",
    close: &[],
    text_name: None,
};

const fn tagged(name: &'static str, calls: TaggedCalls) -> Format {
    Format {
        name,
        thoughts: THINK,
        hidden: &[],
        calls: Calls::Tagged(calls),
        ids: Ids::Made,
    }
}

const fn channels(name: &'static str, channels: Channels) -> Format {
    Format {
        name,
        thoughts: &[],
        hidden: &[],
        calls: Calls::Channels(channels),
        ids: Ids::Made,
    }
}

const FUNCTION_TAGS: TaggedCalls = TaggedCalls {
    section: Some(("<tool_call>", "</tool_call>")),
    open: "<function=",
    name_end: ">",
    head_end: "",
    key_open: "<parameter=",
    key_end: ">",
    key_head_end: "",
    value_open: "",
    value_close: "</parameter>",
    close: "</function>",
    is_text: None,
    has_cdata: false,
};

const ARG_KEYS: TaggedCalls = TaggedCalls {
    section: Some(("<tool_call>", "</tool_call>")),
    open: "",
    name_end: "",
    head_end: "",
    key_open: "<arg_key>",
    key_end: "</arg_key>",
    key_head_end: "",
    value_open: "<arg_value>",
    value_close: "</arg_value>",
    close: "",
    is_text: None,
    has_cdata: false,
};

const INVOKE: TaggedCalls = TaggedCalls {
    section: Some(("<minimax:tool_call>", "</minimax:tool_call>")),
    open: "<invoke name=\"",
    name_end: "\"",
    head_end: ">",
    key_open: "<parameter name=\"",
    key_end: "\"",
    key_head_end: ">",
    value_open: "",
    value_close: "</parameter>",
    close: "</invoke>",
    is_text: None,
    has_cdata: false,
};

const DSML: TaggedCalls = TaggedCalls {
    section: Some(("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")),
    open: "<｜DSML｜invoke name=\"",
    key_open: "<｜DSML｜parameter name=\"",
    value_close: "</｜DSML｜parameter>",
    close: "</｜DSML｜invoke>",
    is_text: Some("string=\"true\""),
    ..INVOKE
};

/// All formats. If several match a template, the first one wins: formats with the rarest marks come
/// first.
pub const FORMATS: &[(&Format, &[&str])] = &[
    (
        &HARMONY_XML,
        &["<|channel|>", "<|constrain|>xml", "rfl:parameter"],
    ),
    (&LLM_JP_HARMONY, &["chat_format=llm-jp-harmony-v1"]),
    (&HARMONY, &["<|channel|>", "<|message|>"]),
    (
        &MUSE,
        &["<|start|>assistant", "<|message|>", "<atem:function_calls>"],
    ),
    (&MUSE, &["to=commentary", "<|eom|>"]),
    (&KIMI_K3, &["<|open|>", "<|sep|>"]),
    (&K2_HORIZON, &["<|ifm|im_start|>", "<ifm|tool_calls>"]),
    (&GEMMA4, &["<|tool_call>"]),
    (&DSML_V32, &["DSML", "function_calls"]),
    (&DSML_V4, &["DSML", "tool_calls"]),
    (&LFM2, &["<|tool_call_start|>"]),
    (&LFM2, &["<|tool_list_start|>"]),
    (&LFM2, &["List of tools: ["]),
    (&COHERE, &["<|START_ACTION|>"]),
    (&APERTUS, &["<|tools_prefix|>"]),
    (&KIMI_K2, &["<|tool_call_argument_begin|>"]),
    (
        &DEEPSEEK_V31,
        &[
            "<｜tool▁sep｜>",
            "<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>",
        ],
    ),
    (&DEEPSEEK_R1, &["<｜tool▁sep｜>", "```json"]),
    (&DEEPSEEK_V31, &["<｜tool▁sep｜>"]),
    (&SOLAR, &["<|tool_call:args|>"]),
    (&HUNYUAN3, &["<tool_calls{}>", "<tool_sep{}>"]),
    (&MINICPM5, &["<function name=\"", "<param name=\""]),
    (&HUNYUAN3_PLAIN, &["<tool_sep>"]),
    (&MINIMAX_M3, &["minimax[>["]),
    (&MINIMAX_M2, &["<minimax:tool_call>"]),
    (&SEED_OSS, &["<seed:tool_call>"]),
    (&GLM, &["<arg_key>"]),
    (&FUNCTION_TAGGED, &["<function=", "<parameter="]),
    (&FUNCTIONARY_V32, &[">>>all"]),
    (&FUNCTIONARY_V31, &["<function="]),
    (&MISTRAL_NAMED, &["[TOOL_CALLS]", "[ARGS]"]),
    (&MISTRAL, &["[TOOL_CALLS]"]),
    (&GIGACHAT31, &["<|function_call|>"]),
    (&GIGACHAT3, &["'function call'", "<|role_sep|>"]),
    (&NEMOTRON_V2, &["<TOOLCALL>"]),
    (&GRANITE33, &["<|tool_call|>"]),
    (&APRIEL, &["<tool_calls>", "[BEGIN FINAL RESPONSE]"]),
    (&TOOL_CALLS, &["<tool_calls>"]),
    (&FIREFUNCTION, &["functools["]),
    (&COMMAND_R, &["Action:", "```json"]),
    (&HERMES, &["<tool_call>"]),
    (&LLAMA3, &["\"parameters\": "]),
    (&LLAMA3, &["<|python_tag|>"]),
];

/// Qwen 2.5 and 3, Hermes, Granite 4, SmolLM3 and many more; also models whose template does not
/// support tools.
pub const HERMES: Format = json("hermes", &["<tool_call>"], &["</tool_call>"]);
/// MiniMax M1.
pub const TOOL_CALLS: Format = json("tool_calls", &["<tool_calls>"], &["</tool_calls>"]);
/// Apriel: IDs follow the arguments.
pub const APRIEL: Format = thinking(
    keyed(
        json("apriel", &["<tool_calls>"], &["</tool_calls>"]),
        CallKeys {
            id_is_last: true,
            ..USUAL
        },
    ),
    &[
        ("<think>", "</think>"),
        ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
    ],
    &["[END FINAL RESPONSE]"],
);
/// Nemotron Nano v2.
pub const NEMOTRON_V2: Format = json("nemotron-v2", &["<TOOLCALL>"], &["</TOOLCALL>"]);
/// Granite 3.3.
pub const GRANITE33: Format = thinking(
    json("granite-3.3", &["<|tool_call|>"], &[]),
    &[("<think>", "</think>")],
    &["<response>", "</response>"],
);
/// Firefunction v2.
pub const FIREFUNCTION: Format = json("firefunction", &["functools"], &[]);
/// Mistral Nemo: a list of calls whose IDs follow the arguments.
pub const MISTRAL: Format = Format {
    ids: Ids::Nine,
    ..keyed(
        json("mistral", &["[TOOL_CALLS]"], &[]),
        CallKeys {
            id_is_last: true,
            ..USUAL
        },
    )
};
/// Command R+.
pub const COMMAND_R: Format = json(
    "command-r",
    &["Action:\n```json", "Action: ```json"],
    &["```"],
);
/// Command R7B, Command A, Cohere 2 MoE.
pub const COHERE: Format = thinking(
    json("cohere", &["<|START_ACTION|>"], &["<|END_ACTION|>"]),
    &[("<|START_THINKING|>", "<|END_THINKING|>")],
    &[
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
    ],
);
/// Apertus.
pub const APERTUS: Format = thinking(
    keyed(
        json("apertus", &["<|tools_prefix|>"], &["<|tools_suffix|>"]),
        CallKeys {
            name_is_key: true,
            ..USUAL
        },
    ),
    &[("<|inner_prefix|>", "<|inner_suffix|>")],
    &[],
);
/// Llama 3.
pub const LLAMA3: Format = Format {
    calls: Calls::Json(JsonCalls {
        open: &["<|python_tag|>"],
        close: &[],
        separator: ";",
        is_bare: true,
        keys: USUAL,
    }),
    ..HERMES_NAMED_LLAMA
};
const HERMES_NAMED_LLAMA: Format = json("llama3", &[], &[]);
/// GigaChat 3.
pub const GIGACHAT3: Format = thinking(
    json(
        "gigachat3",
        &["function call<|role_sep|>\n", "function call<|role_sep|>"],
        &["<|message_sep|>"],
    ),
    THINK,
    &["<|message_sep|>"],
);
/// GigaChat 3.1.
pub const GIGACHAT31: Format = thinking(
    json("gigachat3.1", &["<|function_call|>"], &["<|message_sep|>"]),
    THINK,
    &["<|message_sep|>"],
);

/// Mistral Small 3.2, Ministral, Devstral, Magistral.
pub const MISTRAL_NAMED: Format = Format {
    ids: Ids::Nine,
    thoughts: &[("[THINK]", "[/THINK]"), ("<think>", "</think>")],
    ..named(
        "mistral-named",
        NamedCalls {
            open: "[TOOL_CALLS]",
            id_open: Some("[CALL_ID]"),
            middle: "[ARGS]",
            ..NAMED
        },
    )
};
/// Functionary 3.1.
pub const FUNCTIONARY_V31: Format = named(
    "functionary-3.1",
    NamedCalls {
        open: "<function=",
        middle: ">",
        close: &["</function>"],
        ..NAMED
    },
);
/// Functionary 3.2.
pub const FUNCTIONARY_V32: Format = named(
    "functionary-3.2",
    NamedCalls {
        open: ">>>",
        middle: "\n",
        text_name: Some("all"),
        ..NAMED
    },
);
/// Kimi K2.
pub const KIMI_K2: Format = Format {
    ids: Ids::Text,
    ..named(
        "kimi-k2",
        NamedCalls {
            section: Some(("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")),
            open: "<|tool_call_begin|>",
            middle: "<|tool_call_argument_begin|>",
            close: &["<|tool_call_end|>"],
            ..NAMED
        },
    )
};
const DEEPSEEK_SECTION: Option<(&str, &str)> =
    Some(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"));
/// DeepSeek R1 and V3: the type stands where others have the name.
pub const DEEPSEEK_R1: Format = named(
    "deepseek-r1",
    NamedCalls {
        section: DEEPSEEK_SECTION,
        open: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle: "\n",
        fence: "```json\n",
        close: &[
            "\n```<｜tool▁call▁end｜>",
            "```<｜tool▁call▁end｜>",
            "<｜tool▁call▁end｜>",
            "```",
        ],
        ..NAMED
    },
);
/// DeepSeek V3.1.
pub const DEEPSEEK_V31: Format = named(
    "deepseek-v3.1",
    NamedCalls {
        section: DEEPSEEK_SECTION,
        open: "<｜tool▁call▁begin｜>",
        middle: "<｜tool▁sep｜>",
        close: &["<｜tool▁call▁end｜>"],
        ..NAMED
    },
);
/// Solar Open.
pub const SOLAR: Format = thinking(
    named(
        "solar",
        NamedCalls {
            section: Some(("<|tool_calls|>", "<|calls|>")),
            open: "<|tool_call:begin|>",
            id_end: Some("<|tool_call:name|>"),
            middle: "<|tool_call:args|>",
            close: &["<|tool_call:end|>"],
            ..NAMED
        },
    ),
    &[("<|think|>", "<|end|>")],
    &["<|begin|>assistant", "<|content|>", "<|end|>"],
);

/// Qwen3-Coder, Qwen 3.5 and 3.6, Nemotron 3, StepFun.
pub const FUNCTION_TAGGED: Format = tagged("function-tagged", FUNCTION_TAGS);
/// Seed-OSS.
pub const SEED_OSS: Format = thinking(
    tagged(
        "seed-oss",
        TaggedCalls {
            section: Some(("<seed:tool_call>", "</seed:tool_call>")),
            ..FUNCTION_TAGS
        },
    ),
    &[("<seed:think>", "</seed:think>")],
    &[],
);
/// GLM 4.5 to 5, Laguna, Ling 3, Spark.
pub const GLM: Format = tagged("glm", ARG_KEYS);
/// Hunyuan 3.
pub const HUNYUAN3: Format = thinking(
    tagged(
        "hunyuan3",
        TaggedCalls {
            section: Some(("<tool_calls:opensource>", "</tool_calls:opensource>")),
            open: "<tool_call:opensource>",
            name_end: "<tool_sep:opensource>",
            key_open: "<arg_key:opensource>",
            key_end: "</arg_key:opensource>",
            value_open: "<arg_value:opensource>",
            value_close: "</arg_value:opensource>",
            close: "</tool_call:opensource>",
            ..ARG_KEYS
        },
    ),
    &[("<think:opensource>", "</think:opensource>")],
    &[],
);
/// Hunyuan 3, without the word that its open variant has in all marks.
pub const HUNYUAN3_PLAIN: Format = tagged(
    "hunyuan3-plain",
    TaggedCalls {
        section: Some(("<tool_calls>", "</tool_calls>")),
        open: "<tool_call>",
        name_end: "<tool_sep>",
        close: "</tool_call>",
        ..ARG_KEYS
    },
);
/// MiniMax M2.
pub const MINIMAX_M2: Format = tagged("minimax-m2", INVOKE);
/// MiniMax M3.
pub const MINIMAX_M3: Format = thinking(
    tagged(
        "minimax-m3",
        TaggedCalls {
            section: Some(("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>")),
            open: "]<]minimax[>[<invoke name=\"",
            key_open: "]<]minimax[>[<",
            key_end: ">",
            key_head_end: "",
            // Contains the name of the argument.
            value_close: "]<]minimax[>[</{}>",
            close: "]<]minimax[>[</invoke>",
            ..INVOKE
        },
    ),
    &[("<mm:think>", "</mm:think>")],
    &[],
);
/// MiniCPM 5.
pub const MINICPM5: Format = tagged(
    "minicpm5",
    TaggedCalls {
        section: None,
        open: "<function name=\"",
        key_open: "<param name=\"",
        value_close: "</param>",
        close: "</function>",
        has_cdata: true,
        ..INVOKE
    },
);
/// DeepSeek V3.2.
pub const DSML_V32: Format = tagged("deepseek-v3.2", DSML);
/// DeepSeek V4.
pub const DSML_V4: Format = tagged(
    "deepseek-v4",
    TaggedCalls {
        section: Some(("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")),
        ..DSML
    },
);
/// Kimi K3.
pub const KIMI_K3: Format = thinking(
    tagged(
        "kimi-k3",
        TaggedCalls {
            section: Some(("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")),
            open: "<|open|>call tool=\"",
            name_end: "\"",
            head_end: "<|sep|>",
            key_open: "<|open|>argument key=\"",
            key_end: "\"",
            key_head_end: "<|sep|>",
            value_open: "",
            value_close: "<|close|>argument<|sep|>",
            close: "<|close|>call<|sep|>",
            is_text: Some("type=\"string\""),
            has_cdata: false,
        },
    ),
    &[("<|open|>think<|sep|>", "<|close|>think<|sep|>")],
    &[
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
        "<|end_of_msg|>",
    ],
);

/// K2 Horizon. The effort of reasoning decides its marks.
pub const K2_HORIZON: Format = thinking(
    tagged(
        "k2-horizon",
        TaggedCalls {
            section: Some(("<ifm|tool_calls>", "</ifm|tool_calls>")),
            open: "<ifm|tool_call>",
            name_end: "\n",
            key_open: "<ifm|arg_key>",
            key_end: "</ifm|arg_key>",
            value_open: "<ifm|arg_value>",
            value_close: "</ifm|arg_value>",
            close: "</ifm|tool_call>",
            ..ARG_KEYS
        },
    ),
    &[
        ("<ifm|think>", "</ifm|think>"),
        ("<ifm|think_fast>", "</ifm|think_fast>"),
        ("<ifm|think_faster>", "</ifm|think_faster>"),
    ],
    &[],
);

/// Gemma 4.
pub const GEMMA4: Format = Format {
    name: "gemma4",
    thoughts: &[("<|channel>thought", "<channel|>")],
    hidden: &["<|channel>final"],
    calls: Calls::Literal(LiteralCalls {
        open: "<|tool_call>",
        name_open: "call:",
        close: "<tool_call|>",
        style: Style::Gemma,
        is_list: false,
    }),
    ids: Ids::Made,
};
/// LFM 2 and 2.5.
pub const LFM2: Format = Format {
    name: "lfm2",
    thoughts: THINK,
    hidden: &[],
    calls: Calls::Literal(LiteralCalls {
        open: "<|tool_call_start|>",
        name_open: "",
        close: "<|tool_call_end|>",
        style: Style::Python,
        is_list: true,
    }),
    ids: Ids::Made,
};
const HARMONY_CHANNELS: Channels = Channels {
    starts: &["<|start|>", "<|channel|>"],
    message: "<|message|>",
    to_user: "<|channel|>final<|message|>",
    ends: &["<|end|>", "<|call|>", "<|return|>"],
    thoughts: &["analysis"],
    marks: &["<|channel|>", "<|constrain|>"],
    words: &[
        "assistant",
        "user",
        "analysis",
        "commentary",
        "final",
        "json",
        "code",
    ],
    inner: None,
    wrapper: None,
    is_spaced: false,
};
/// gpt-oss.
pub const HARMONY: Format = channels("harmony", HARMONY_CHANNELS);
/// LLM-jp 4.1: gpt-oss's format by a tokenizer that writes a space after each mark.
pub const LLM_JP_HARMONY: Format = channels(
    "llm-jp-harmony",
    Channels {
        to_user: "<|channel|> final<|message|>",
        is_spaced: true,
        ..HARMONY_CHANNELS
    },
);
/// gpt-oss's format with tagged arguments.
pub const HARMONY_XML: Format = channels(
    "harmony-xml",
    Channels {
        words: &[
            "assistant",
            "user",
            "analysis",
            "commentary",
            "final",
            "xml",
        ],
        inner: Some(&RFL_TAGS),
        wrapper: Some(["<rfl:call name=\"", "\">", "</rfl:call>"]),
        ..HARMONY_CHANNELS
    },
);
const RFL_TAGS: Format = Format {
    thoughts: &[],
    ..tagged(
        "rfl-tags",
        TaggedCalls {
            section: None,
            open: "<rfl:call name=\"",
            key_open: "<rfl:parameter name=\"",
            value_close: "</rfl:parameter>",
            close: "</rfl:call>",
            ..INVOKE
        },
    )
};
/// Muse Glimmer and Spark: channels, with tagged calls within those of tools.
pub const MUSE: Format = channels(
    "muse",
    Channels {
        starts: &["<|start|>"],
        message: "<|message|>",
        to_user: "to=user<|message|>",
        ends: &["<|eom|>", "<|eot|>"],
        thoughts: &["to=self"],
        marks: &[],
        words: &["assistant", "user", "self", "tool", "commentary"],
        inner: Some(&MUSE_TAGS),
        wrapper: None,
        is_spaced: false,
    },
);
const MUSE_TAGS: Format = Format {
    thoughts: &[],
    ..tagged(
        "muse-tags",
        TaggedCalls {
            section: Some(("<atem:function_calls>", "</atem:function_calls>")),
            open: "<atem:invoke name=\"",
            key_open: "<atem:parameter name=\"",
            value_close: "</atem:parameter>",
            close: "</atem:invoke>",
            ..INVOKE
        },
    )
};
/// Reasoning, but no calls.
pub const PLAIN: Format = Format {
    name: "plain",
    thoughts: THINK,
    hidden: &[],
    calls: Calls::None,
    ids: Ids::Made,
};
