{{- define "wavefill.name" -}}
{{- if contains "wavefill" .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-wavefill" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "wavefill.selector" -}}
app.kubernetes.io/name: wavefill
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "wavefill.labels" -}}
{{ include "wavefill.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "wavefill.claim" -}}
{{- .Values.data.existingClaim | default (printf "%s-data" (include "wavefill.name" .)) -}}
{{- end -}}

{{- define "wavefill.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* What the schema cannot say. */ -}}
{{- define "wavefill.check" -}}
{{- $many := or (gt (int .Values.replicas) 1) .Values.autoscaling.enabled -}}
{{- if and $many (not .Values.data.existingClaim) (not (has "ReadWriteMany" .Values.data.accessModes)) -}}
{{- fail (printf "data.accessModes %v lets pods of one node only mount the models: with more than one replica, set data.accessModes={ReadWriteMany}, or data.existingClaim" .Values.data.accessModes) -}}
{{- end -}}
{{- if and (has (toString .Values.maxSurge) (list "0" "0%")) (has (toString .Values.maxUnavailable) (list "0" "0%")) -}}
{{- fail "maxSurge and maxUnavailable are both 0, so that no rollout could begin: set one of them to 1" -}}
{{- end -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas %d is more than autoscaling.maxReplicas %d" (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if mod (int .Values.gpus) (int .Values.tensorParallel) -}}
{{- fail (printf "gpus %d is no multiple of tensorParallel %d: each engine has tensorParallel GPUs of its own" (int .Values.gpus) (int .Values.tensorParallel)) -}}
{{- end -}}
{{- range .Values.args -}}
{{- if and $.Values.apiKeySecret (hasPrefix "--api-key-file" .) -}}
{{- fail "args has --api-key-file, which the chart sets for apiKeySecret: leave one of them out" -}}
{{- end -}}
{{- end -}}
{{- $own := dict "WAVEFILL_MODEL" "model" "WAVEFILL_DRAIN_DELAY" "drain.delaySeconds" "WAVEFILL_DRAIN_SECONDS" "drain.seconds" "WAVEFILL_TENSOR_PARALLEL" "tensorParallel" "WAVEFILL_DATA_PARALLEL" "gpus" -}}
{{- if .Values.apiKeySecret }}{{ $_ := set $own "WAVEFILL_API_KEY_FILE" "apiKeySecret" }}{{ end -}}
{{- if .Values.huggingFaceSecret }}{{ $_ := set $own "HF_TOKEN" "huggingFaceSecret" }}{{ end -}}
{{- range .Values.env -}}
{{- if has .name (list "WAVEFILL_HOST" "WAVEFILL_PORT") -}}
{{- fail (printf "env sets %s, but the Service and the probes ask all addresses of the pod at port 8000: leave it out; service.port is the Service's" .name) -}}
{{- else if hasKey $own .name -}}
{{- fail (printf "env sets %s, which the chart sets, too: set %s instead" .name (get $own .name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Arguments by which the server uses all GPUs of the pod. */ -}}
{{- define "wavefill.parallel" -}}
{{- if gt (int .Values.tensorParallel) 1 }}
- --tensor-parallel
- {{ .Values.tensorParallel | quote }}
{{- end }}
{{- $engines := div (int .Values.gpus) (int .Values.tensorParallel) }}
{{- if gt $engines 1 }}
- --data-parallel
- {{ $engines | quote }}
{{- end }}
{{- end -}}

{{- /* The server checks the header Host where --allowed-hosts is set; localhost is always one. */ -}}
{{- define "wavefill.probe" -}}
path: {{ . }}
port: http
httpHeaders: [{name: Host, value: localhost}]
{{- end -}}

{{- define "wavefill.resources" -}}
{{- $all := deepCopy .Values.resources -}}
{{- if .Values.gpus -}}
{{- $_ := set $all "limits" (merge (dict "nvidia.com/gpu" (int .Values.gpus)) ($all.limits | default dict)) -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}
