{{- define "samite.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name }}
{{- else -}}
{{ .Release.Name }}-{{ .Chart.Name }}
{{- end -}}
{{- end }}

{{- define "samite.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "samite.labels" -}}
{{ include "samite.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "samite.hasKey" -}}
{{- if or .Values.auth.key .Values.auth.secret }}true{{ end -}}
{{- end }}

{{- define "samite.secret" -}}
{{ .Values.auth.secret | default (printf "%s-key" (include "samite.name" .)) }}
{{- end }}

{{- define "samite.claim" -}}
{{ .Values.model.claim | default (printf "%s-model" (include "samite.name" .)) }}
{{- end }}

{{- define "samite.hosts" -}}
{{- $name := printf "%s.%s" (include "samite.name" .) .Release.Namespace }}
{{- $service := list $name (printf "%s.svc" $name) }}
{{- concat $service .Values.inference.route.hostnames .Values.allowedHosts | join "," -}}
{{- end }}
