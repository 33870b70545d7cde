//! Chat templates.

use crate::entry::{Failure, Outcome, array, export, required_text, text};
use crate::layout::ChatMessage;
use samite_chat::{
    BUILTIN, ChatTemplate, DateTime, Guard, Message, MessageRole, PromptOptions, Sources,
};
use std::ffi::{CString, c_char};
use std::sync::OnceLock;

/// Returns the names of the built-in templates.
fn names() -> &'static [CString] {
    static NAMES: OnceLock<Vec<CString>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let names = BUILTIN
            .iter()
            .filter_map(|(name, _)| CString::new(*name).ok());
        names.collect()
    })
}

fn message(role: &str, content: &str) -> Outcome<Message> {
    const ROLES: [MessageRole; 4] = [
        MessageRole::System,
        MessageRole::User,
        MessageRole::Assistant,
        MessageRole::Tool,
    ];
    let role = match role {
        "developer" => MessageRole::System,
        role => {
            let known = ROLES.into_iter().find(|known| known.name() == role);
            known.ok_or_else(|| Failure::new(format!("{role:?} is no role")))?
        }
    };
    Ok(Message::new(role, content.to_owned()))
}

fn now() -> DateTime {
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed();
    DateTime::new(since.map_or(0, |time| time.as_secs().cast_signed()), 0)
}

export! {
    /// Formats a conversation with a template, given by its text or the name of one of
    /// [`llama_chat_builtin_templates`]; "chatml" for null.
    fn llama_chat_apply_template(
        template: *const c_char, messages: *const ChatMessage, count: usize,
            add_assistant: crate::layout::Flag, buffer: *mut c_char, length: i32
    ) -> i32, or -1; {
        // SAFETY: the caller upholds the header's contract.
        let (template, messages) = unsafe { (text(template), array("messages", messages, count)?) };
        let template = template.map_or("chatml".into(), |template| template.to_string_lossy());
        let messages = messages.iter().map(|one| {
            // SAFETY: as above.
            let (role, content) = unsafe {
                (
                    required_text("role", one.role)?,
                    required_text("content", one.content)?,
                )
            };
            message(role, content)
        });
        let messages = messages.collect::<Outcome<Vec<_>>>()?;
        let chat = ChatTemplate::choose(&Sources::default(), Some(&template))?;
        let options = PromptOptions {
            add_generation_prompt: add_assistant.is_on(),
            ..PromptOptions::new(now())
        };
        let prompt = chat.prompt(&messages, &options, &Guard::new([]))?.text();
        // Like `strncpy`, write a 0 only if there is room: callers use the returned length.
        let length = usize::try_from(length).unwrap_or(0);
        // SAFETY: as above.
        let out = unsafe {
            crate::entry::array_mut(
                "buf",
                buffer.cast::<u8>(),
                if buffer.is_null() { 0 } else { length },
            )
        }?;
        let mut bytes = prompt.bytes();
        for to in out.iter_mut() {
            *to = bytes.next().unwrap_or(0);
        }
        i32::try_from(prompt.len()).map_err(|_| Failure::new("the prompt is too long"))
    }

    /// Writes the names of the built-in templates and returns their number.
    fn llama_chat_builtin_templates(output: *mut *const c_char, length: usize) -> i32, or 0; {
        let names = names();
        if !output.is_null() {
            let count = names.len().min(length);
            // SAFETY: the caller upholds the header's contract.
            let out = unsafe { crate::entry::array_mut("output", output, count) }?;
            for (to, name) in out.iter_mut().zip(names) {
                *to = name.as_ptr();
            }
        }
        Ok(names.len() as i32)
    }
}
