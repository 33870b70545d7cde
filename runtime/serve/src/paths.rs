//! The paths of the server and their methods.

use crate::options::ServeOptions;
use crate::page;

/// Targets of GET requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Get {
    Health,
    Ready,
    OpenApi,
    Models,
    ModelEvents,
    Props,
    Metrics,
    Plan,
    Slots,
    Adapters,
    TokenizerInfo,
    ModelInfo,
    ServerInfo,
    KvEventSources,
    Version,
    Load,
    Stream,
    OllamaVersion,
    OllamaTags,
    OllamaPs,
    File,
}

/// Targets of POST requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Post {
    Download,
    Load,
    Unload,
    Props,
    Slot,
    Adapters,
    Tokenize,
    Detokenize,
    ApplyTemplate,
    CountChat,
    RenderChat,
    Native,
    Infill,
    Completion,
    RenderCompletion,
    Chat,
    ChatControl,
    Response,
    CountResponse,
    RenderResponse,
    RenderMessage,
    Message,
    CountMessage,
    Embeddings,
    NativeEmbeddings,
    Rerank,
    OllamaShow,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaChat,
    OllamaGenerate,
    OllamaPull,
    OllamaOther,
    Predict,
    StreamLookup,
}

/// Targets of DELETE requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delete {
    Stream,
    Model,
    OllamaModel,
}

/// The methods of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Methods {
    pub get: Option<Get>,
    pub post: Option<Post>,
    pub delete: Option<Delete>,
}

impl Methods {
    fn get(get: Get) -> Self {
        Methods {
            get: Some(get),
            ..Methods::default()
        }
    }

    fn post(post: Post) -> Self {
        Methods {
            post: Some(post),
            ..Methods::default()
        }
    }

    fn both(get: Get, post: Post) -> Self {
        Methods {
            get: Some(get),
            post: Some(post),
            ..Methods::default()
        }
    }

    fn or_delete(self, delete: Delete) -> Self {
        Methods {
            delete: Some(delete),
            ..self
        }
    }

    fn delete(delete: Delete) -> Self {
        Methods::default().or_delete(delete)
    }

    /// Returns the names of the methods for the `Allow` header.
    pub fn names(self) -> String {
        let names = [
            self.get.map(|_| "GET, HEAD"),
            self.post.map(|_| "POST"),
            self.delete.map(|_| "DELETE"),
        ];
        let names: Vec<&str> = names.into_iter().flatten().collect();
        names.join(", ")
    }

    /// Returns the methods of a path, or `None` if the path does not exist.
    pub fn for_path(options: &ServeOptions, path: &str) -> Option<Self> {
        Some(match path {
            "/health" | "/v1/health" => Methods::get(Get::Health),
            "/ready" | "/health_generate" => Methods::get(Get::Ready),
            "/load" => Methods::get(Get::Load),
            "/get_model_info" => Methods::get(Get::ModelInfo),
            "/get_server_info" | "/server_info" => Methods::get(Get::ServerInfo),
            "/kv_event_sources" => Methods::get(Get::KvEventSources),
            "/version" => Methods::get(Get::Version),
            "/openapi.json" => Methods::get(Get::OpenApi),
            "/v1/models" => Methods::get(Get::Models),
            "/models" => Methods::both(Get::Models, Post::Download).or_delete(Delete::Model),
            "/models/sse" => Methods::get(Get::ModelEvents),
            "/models/load" => Methods::post(Post::Load),
            "/models/unload" => Methods::post(Post::Unload),
            "/props" => Methods::both(Get::Props, Post::Props),
            "/metrics" => Methods::get(Get::Metrics),
            "/plan" => Methods::get(Get::Plan),
            "/slots" => Methods::get(Get::Slots),
            "/lora-adapters" => Methods::both(Get::Adapters, Post::Adapters),
            "/v1/stream" => Methods::get(Get::Stream).or_delete(Delete::Stream),
            "/v1/streams/lookup" => Methods::post(Post::StreamLookup),
            "/tokenizer_info" => Methods::get(Get::TokenizerInfo),
            "/tokenize" => Methods::post(Post::Tokenize),
            "/detokenize" => Methods::post(Post::Detokenize),
            "/apply-template" => Methods::post(Post::ApplyTemplate),
            "/chat/completions/input_tokens" | "/v1/chat/completions/input_tokens" => {
                Methods::post(Post::CountChat)
            }
            "/completion" | "/completions" => Methods::post(Post::Native),
            "/infill" => Methods::post(Post::Infill),
            "/v1/completions" => Methods::post(Post::Completion),
            "/v1/completions/render" => Methods::post(Post::RenderCompletion),
            "/chat/completions" | "/v1/chat/completions" => Methods::post(Post::Chat),
            "/v1/chat/completions/render" => Methods::post(Post::RenderChat),
            "/v1/chat/completions/control" => Methods::post(Post::ChatControl),
            "/responses" | "/v1/responses" => Methods::post(Post::Response),
            "/responses/input_tokens" | "/v1/responses/input_tokens" => {
                Methods::post(Post::CountResponse)
            }
            "/v1/responses/render" => Methods::post(Post::RenderResponse),
            "/v1/messages" => Methods::post(Post::Message),
            "/v1/messages/render" => Methods::post(Post::RenderMessage),
            "/v1/messages/count_tokens" => Methods::post(Post::CountMessage),
            "/v1/embeddings" => Methods::post(Post::Embeddings),
            "/embedding" | "/embeddings" => Methods::post(Post::NativeEmbeddings),
            "/rerank" | "/reranking" | "/v1/rerank" | "/v1/reranking" => {
                Methods::post(Post::Rerank)
            }
            "/api/version" => Methods::get(Get::OllamaVersion),
            "/api/tags" => Methods::get(Get::OllamaTags),
            "/api/ps" => Methods::get(Get::OllamaPs),
            "/api/show" => Methods::post(Post::OllamaShow),
            "/api/embed" => Methods::post(Post::OllamaEmbed),
            "/api/embeddings" => Methods::post(Post::OllamaEmbeddings),
            "/api/chat" => Methods::post(Post::OllamaChat),
            "/api/generate" => Methods::post(Post::OllamaGenerate),
            "/api/pull" => Methods::post(Post::OllamaPull),
            "/api/delete" => Methods::delete(Delete::OllamaModel),
            "/api/push" | "/api/create" | "/api/copy" => Methods::post(Post::OllamaOther),
            _ if path.starts_with("/v1/models/") || path.starts_with("/models/") => {
                Methods::get(Get::Models)
            }
            _ if path.starts_with("/slots/") => Methods::post(Post::Slot),
            _ if options.predict_path.as_deref() == Some(path) => Methods::post(Post::Predict),
            _ if options.page && page::is_file(path) => Methods::get(Get::File),
            _ => return None,
        })
    }
}
