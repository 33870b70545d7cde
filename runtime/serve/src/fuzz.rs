//! Entry point of fuzz targets: reads the body of a request without a connection.

use crate::access::Caller;
use crate::account::{Accounts, RequestAccount};
use crate::app::App;
use crate::body::parse;
use crate::context::RequestContext;
use crate::fields::Fields;
use crate::turns::Turns;
use crate::{api, chat};
use std::sync::Arc;

/// Reads the bytes of a body as JSON and then as a request of the API with this index. Returns the
/// error message if it is rejected. Computes nothing.
pub fn read_body(app: &Arc<App>, interface: usize, bytes: &[u8]) -> Option<String> {
    let account = Arc::new(RequestAccount::new(&Arc::new(Accounts::new(1 << 30)), 0));
    let caller = Caller {
        owner: 0,
        is_admin: true,
    };
    let large = Turns::new("large bodies", 1, 1);
    let context = RequestContext::new(Arc::clone(app), caller, Arc::clone(&account), large);
    let read = || {
        let body = parse(bytes, &account)?;
        match interface % INTERFACES {
            0 => chat::job(&context, &body).map(drop),
            1 => api::native::job(&context, &body).map(drop),
            2 => api::native::openai_job(&context, &body).map(drop),
            3 => api::native::infill(&context, &body).map(drop),
            4 => api::responses::job(&context, &body).map(drop),
            5 => api::anthropic::job(&context, &body).map(drop),
            6 => api::ollama::job(&context, &body, true).map(drop),
            7 => api::ollama::job(&context, &body, false).map(drop),
            8 => api::tokens::tokenize(&context, &body).map(drop),
            9 => api::tokens::detokenize(&context, &body).map(drop),
            10 => api::tokens::apply_template(&context, &body).map(drop),
            11 => api::tokens::count(&context, &body).map(drop),
            12 => api::responses::count(&context, &body).map(drop),
            13 => api::anthropic::count(&context, &body).map(drop),
            14 => api::embeddings::openai(&context, &body).map(drop),
            15 => api::ollama::keep_alive(&body).map(drop),
            _ => chat::no_echo(&Fields::new(&body)?),
        }
    };
    read().err().map(|error| error.message)
}

/// Number of APIs.
pub const INTERFACES: usize = 17;
