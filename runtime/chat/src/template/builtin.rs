//! Templates by name: formats from before model files contained templates.

/// Names and texts.
pub const BUILTIN: &[(&str, &str)] = &[
    (
        "chatml",
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\
         {% endfor %}\
         {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ),
    (
        "llama2",
        "{% set ns = namespace(system='') %}{% for m in messages %}\
         {% if m.role == 'system' %}{% set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' \
         %}\
         {% elif m.role == 'assistant' %}{{ ' ' + m.content|trim + ' ' + eos_token }}\
         {% else %}{{ bos_token + '[INST] ' + ns.system + m.content|trim + ' [/INST]' }}\
         {% set ns.system = '' %}{% endif %}{% endfor %}",
    ),
    (
        "llama3",
        "{{ bos_token }}{% for m in messages %}\
         {{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + \
         '<|end_header_id|>\n\n' + m.content|trim + '<|eot_id|>' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\
         {% endif %}",
    ),
    (
        "llama4",
        "{{ bos_token }}{% for m in messages %}\
         {{ '<|header_start|>' + ('ipython' if m.role == 'tool' else m.role) + \
         '<|header_end|>\n\n' + m.content|trim + '<|eot|>' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}\
         {% endif %}",
    ),
    (
        "mistral-v1",
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}\
         {% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}\
         {% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}\
         {% else %}{{ ' [INST] ' + ns.system + m.content + ' [/INST]' }}{% set ns.system = '' %}\
         {% endif %}{% endfor %}",
    ),
    (
        "mistral-v3",
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}\
         {% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}\
         {% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}\
         {% else %}{{ '[INST] ' + ns.system + m.content + '[/INST]' }}{% set ns.system = '' %}\
         {% endif %}{% endfor %}",
    ),
    (
        "mistral-v3-tekken",
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}\
         {% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}\
         {% elif m.role == 'assistant' %}{{ m.content + eos_token }}\
         {% else %}{{ '[INST]' + ns.system + m.content + '[/INST]' }}{% set ns.system = '' %}\
         {% endif %}{% endfor %}",
    ),
    (
        "mistral-v7",
        "{{ bos_token }}{% for m in messages %}\
         {% if m.role == 'system' %}{{ '[SYSTEM_PROMPT] ' + m.content + '[/SYSTEM_PROMPT]' }}\
         {% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}\
         {% else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}{% endfor %}",
    ),
    (
        "mistral-v7-tekken",
        "{{ bos_token }}{% for m in messages %}\
         {% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}\
         {% elif m.role == 'assistant' %}{{ m.content + eos_token }}\
         {% else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}{% endfor %}",
    ),
    (
        "gemma",
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}\
         {% if m.role == 'system' %}{% set ns.system = m.content|trim + '\n\n' %}\
         {% else %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' + \
         ns.system + m.content|trim + '<end_of_turn>\n' }}\
         {% set ns.system = '' %}{% endif %}{% endfor %}{% if add_generation_prompt %}\
         {{ '<start_of_turn>model\n' }}{% endif %}",
    ),
    (
        "phi3",
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    ),
    (
        "phi4",
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + \
         '<|im_end|>' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
    ),
    (
        "falcon3",
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    ),
    (
        "zephyr",
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}\
         {% endfor %}\
         {% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    ),
    (
        "monarch",
        "{% for m in messages %}{{ ('' if loop.first else bos_token) + m.role + '\n' + m.content \
         + '</s>\n' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}",
    ),
    (
        "openchat",
        "{{ bos_token }}{% for m in messages %}\
         {% if m.role == 'system' %}{{ m.content + '<|end_of_turn|>' }}\
         {% else %}{{ 'GPT4 Correct ' + m.role|title + ': ' + m.content + '<|end_of_turn|>' }}\
         {% endif %}{% endfor %}\
         {% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}",
    ),
    (
        "vicuna",
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n\n' }}\
         {% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + '</s>\n' }}\
         {% else %}{{ 'USER: ' + m.content + '\n' }}{% endif %}{% endfor %}\
         {% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    ),
    (
        "vicuna-orca",
        "{% for m in messages %}{% if m.role == 'system' %}{{ 'SYSTEM: ' + m.content + '\n' }}\
         {% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + '</s>\n' }}\
         {% else %}{{ 'USER: ' + m.content + '\n' }}{% endif %}{% endfor %}\
         {% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    ),
    (
        "deepseek",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\
         {% elif m.role == 'assistant' %}{{ '### Response:\n' + m.content + '\n<|EOT|>\n' }}\
         {% else %}{{ '### Instruction:\n' + m.content + '\n' }}{% endif %}{% endfor %}\
         {% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}",
    ),
    (
        "deepseek2",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n\n' }}\
         {% elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content + eos_token }}\
         {% else %}{{ 'User: ' + m.content + '\n\n' }}{% endif %}{% endfor %}\
         {% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    ),
    (
        "deepseek3",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n\n' }}\
         {% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}\
         {% else %}{{ '<｜User｜>' + m.content }}{% endif %}{% endfor %}\
         {% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
    ),
    (
        "command-r",
        "{{ bos_token }}{% set names = {'system': 'SYSTEM', 'user': 'USER', 'assistant': \
         'CHATBOT', 'tool': 'SYSTEM'} %}{% for m in messages %}\
         {{ '<|START_OF_TURN_TOKEN|><|' + names[m.role] + '_TOKEN|>' + m.content|trim + \
         '<|END_OF_TURN_TOKEN|>' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
    ),
    (
        "chatglm3",
        "{{ '[gMASK]sop' }}{% for m in messages %}{{ '<|' + m.role + '|>\n ' + m.content }}\
         {% endfor %}\
         {% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    ),
    (
        "chatglm4",
        "{{ '[gMASK]<sop>' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}\
         {% endfor %}\
         {% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    ),
    (
        "minicpm",
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<用户>' + m.content|trim + '<AI>' }}{% else %}{{ m.content|trim }}{% endif %}{% endfor %}",
    ),
    (
        "exaone3",
        "{% for m in messages %}{{ '[|' + m.role + '|]' + m.content|trim + ('\n' if m.role == \
         'user' else '[|endofturn|]\n') }}{% endfor %}\
         {% if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}",
    ),
    (
        "rwkv-world",
        "{% for m in messages %}{{ ('User: ' if m.role == 'user' else 'Assistant: ' if m.role == \
         'assistant' else '') + m.content|trim + '\n\n' }}{% endfor %}\
         {% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    ),
    (
        "granite",
        "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + \
         '<|end_of_text|>\n' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}\
         {% endif %}",
    ),
    (
        "gpt-oss",
        "{% for m in messages %}{{ '<|start|>' + m.role + ('<|channel|>final' if m.role == \
         'assistant' else '') + '<|message|>' + m.content + \
         ('<|return|>' if m.role == 'assistant' and loop.last else '<|end|>') }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
    ),
    (
        "seed_oss",
        "{% for m in messages %}{{ bos_token + m.role + '\n' + m.content|trim + eos_token }}\
         {% endfor %}\
         {% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}",
    ),
    (
        "kimi-k2",
        "{% for m in messages %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content \
         + '<|im_end|>' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::{DateTime, Template};
    use serde_json::json;

    #[test]
    fn builtin_templates_show_each_role() {
        let context = json!({"bos_token": "<s>", "eos_token": "</s>",
            "add_generation_prompt": true, "messages": [
            {"role": "system", "content": "SYSTEM"}, {"role": "user", "content": "ONE"},
            {"role": "assistant", "content": "TWO"}, {"role": "user", "content": "THREE"}]});
        let render = |name: &str| {
            let source = BUILTIN.iter().find(|named| named.0 == name).unwrap().1;
            Template::new(source)
                .unwrap()
                .render(&context, DateTime::new(0, 0))
                .unwrap()
        };
        for (name, _) in BUILTIN {
            let text = render(name);
            let mut rest = text.as_str();
            for word in ["SYSTEM", "ONE", "TWO", "THREE"] {
                let at = rest
                    .rfind(word)
                    .unwrap_or_else(|| panic!("{name}: no {word} in {text}"));
                let first = rest.find(word).unwrap();
                // Names of roles may also be words of the text.
                assert!(first == at || word == "SYSTEM", "{name}: {text}");
                rest = &rest[first..];
            }
        }
        for (name, expected) in [
            (
                "llama2",
                "<s>[INST] <<SYS>>\nSYSTEM\n<</SYS>>\n\nONE [/INST] TWO </s><s>[INST] THREE [/INST]",
            ),
            (
                "mistral-v3",
                "<s>[INST] SYSTEM\n\nONE[/INST] TWO</s>[INST] THREE[/INST]",
            ),
            (
                "gemma",
                "<s><start_of_turn>user\nSYSTEM\n\nONE<end_of_turn>\n<start_of_turn>model\nTWO<end_of_turn>\n<start_of_turn>user\nTHREE<end_of_turn>\n<start_of_turn>model\n",
            ),
            (
                "phi3",
                "<|system|>\nSYSTEM<|end|>\n<|user|>\nONE<|end|>\n<|assistant|>\nTWO<|end|>\n<|user|>\nTHREE<|end|>\n<|assistant|>\n",
            ),
            (
                "deepseek3",
                "<s>SYSTEM\n\n<｜User｜>ONE<｜Assistant｜>TWO<｜end▁of▁sentence｜><｜User｜>THREE<｜Assistant｜>",
            ),
            (
                "openchat",
                "<s>SYSTEM<|end_of_turn|>GPT4 Correct User: ONE<|end_of_turn|>GPT4 Correct Assistant: TWO<|end_of_turn|>GPT4 Correct User: THREE<|end_of_turn|>GPT4 Correct Assistant:",
            ),
        ] {
            assert_eq!(render(name), expected, "{name}");
        }
    }
}
