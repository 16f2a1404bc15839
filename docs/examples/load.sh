aiperf profile --url http://127.0.0.1:8000 --model demo --endpoint-type completions --streaming \
  --tokenizer demo_weights/triforce_serve_demo/target --use-server-token-count --use-legacy-max-tokens \
  --isl 2048 --osl 128 --extra-inputs ignore_eos:true --random-seed 0 \
  --request-rate 2 --arrival-pattern poisson --request-count 200 --no-server-metrics --no-gpu-telemetry
