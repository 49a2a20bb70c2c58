NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --tuner_type full --dataset 'AI-MO/NuminaMath-TIR#8000' \
    --reward_funcs accuracy --use_vllm true --vllm_mode colocate --per_device_train_batch_size 8 --num_generations 8 --max_steps 100 \
    --deepspeed zero2 --beta 0 --save_steps 50
