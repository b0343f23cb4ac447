{{- define "logitship.name" -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "logitship.selector" -}}
app.kubernetes.io/name: logitship
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "logitship.labels" -}}
{{ include "logitship.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: {{ .Values.engine }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* True if only some shipped processors may run. */}}
{{- define "logitship.restricted" -}}
{{- if or .Values.processors.allowedDigests (not .Values.processors.allowAny) }}true{{ end -}}
{{- end -}}

{{/* The paths of the probes: those of the engines only say that they live. */}}
{{- define "logitship.readyPath" -}}
{{- if eq .Values.engine "logitship" }}/health/ready{{ else }}/health{{ end -}}
{{- end -}}

{{- define "logitship.command" -}}
{{- $v := .Values -}}
{{- if and $v.processors.shipping (not $v.keysSecret) (not $v.allowAnonymousCode) -}}
{{- fail "clients may ship code, and none needs a key: set keysSecret, or allowAnonymousCode: true" -}}
{{- end -}}
{{- if eq $v.engine "logitship" -}}
- logitship
- serve
- --model-path={{ $v.model }}
- --host=0.0.0.0
- --port={{ $v.service.port }}
- --shutdown-timeout={{ $v.shutdownTimeout }}
- --log-format=json
{{- if $v.processors.shipping }}
- --enable-custom-logit-processor
{{- if $v.allowAnonymousCode }}
- --allow-anonymous-code
{{- end }}
- --max-sandboxes={{ $v.processors.maxSandboxes }}
- --sandbox-memory={{ $v.processors.sandboxMemory | int64 }}
{{- end }}
{{- if include "logitship.restricted" . }}
- --allow-processor=/etc/logitship/allowed-digests
{{- end }}
- --blocked-digests=/etc/logitship/blocked-digests
- --allowed-host={{ include "logitship.name" . }}
- --allowed-host={{ include "logitship.name" . }}.{{ .Release.Namespace }}
- --allowed-host={{ include "logitship.name" . }}.{{ .Release.Namespace }}.svc
- --allowed-host={{ include "logitship.name" . }}.{{ .Release.Namespace }}.svc.cluster.local
{{- range $v.allowedHosts }}
- --allowed-host={{ . }}
{{- end }}
{{- else if eq $v.engine "sglang" -}}
- python3
- -m
- sglang.launch_server
- --model-path={{ $v.model }}
- --host=0.0.0.0
- --port={{ $v.service.port }}
- --enable-metrics
{{- if $v.processors.shipping }}
- --enable-custom-logit-processor
{{- end }}
{{- if $v.keysSecret }}
- --api-key=$(API_KEY)
{{- end }}
{{- else if eq $v.engine "vllm" -}}
- vllm
- serve
- {{ $v.model }}
- --host=0.0.0.0
- --port={{ $v.service.port }}
- --logits-processors=logitship.server.vllm:LogitshipLogitsProcessor
{{- else -}}
{{- fail (printf "engine must be logitship, sglang or vllm, not %q" $v.engine) -}}
{{- end }}
{{- range $v.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "logitship.keyFrom" -}}
valueFrom:
  secretKeyRef: {name: {{ index . 0 }}, key: {{ index . 1 }}, optional: {{ index . 2 }}}
{{- end -}}

{{- define "logitship.environment" -}}
{{- $v := .Values -}}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: /models}
{{- if eq $v.engine "logitship" }}
{{- if $v.keysSecret }}
- name: LOGITSHIP_API_KEY
  {{- include "logitship.keyFrom" (list $v.keysSecret "api-keys" false) | nindent 2 }}
- name: LOGITSHIP_SHIPPING_API_KEY
  {{- include "logitship.keyFrom" (list $v.keysSecret "shipping-api-keys" true) | nindent 2 }}
- name: LOGITSHIP_METRICS_API_KEY
  {{- include "logitship.keyFrom" (list $v.keysSecret "metrics-api-key" true) | nindent 2 }}
{{- end }}
{{- else }}
{{- $prefix := printf "LOGITSHIP_%s" (upper $v.engine) }}
- {name: "{{ $prefix }}_MAX_SANDBOXES", value: {{ $v.processors.maxSandboxes | quote }}}
- {name: "{{ $prefix }}_SANDBOX_MEMORY", value: {{ $v.processors.sandboxMemory | int64 | quote }}}
{{- if include "logitship.restricted" . }}
- {name: "{{ $prefix }}_ALLOW_PROCESSOR", value: /etc/logitship/allowed-digests}
{{- end }}
{{- if eq $v.engine "vllm" }}
- {name: LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR, value: {{ ternary "1" "0" $v.processors.shipping | quote }}}
{{- end }}
{{- if $v.keysSecret }}
- name: {{ ternary "VLLM_API_KEY" "API_KEY" (eq $v.engine "vllm") }}
  {{- include "logitship.keyFrom" (list $v.keysSecret "api-keys" false) | nindent 2 }}
{{- if eq $v.engine "sglang" }}
- name: LOGITSHIP_SGLANG_SHIPPING_API_KEY
  {{- include "logitship.keyFrom" (list $v.keysSecret "shipping-api-keys" true) | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}
{{- with $v.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
